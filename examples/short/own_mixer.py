"""A custom mixer of tokens compared with ours: the same small model, parameters and sequences, on the passkey task."""

from saccade import learning, masks, nn

own = learning.Mixer(lambda width, length, layer: nn.DifferentialAttention(width, 4, layer=layer, mask=masks.Causal()))
mixers = {"mine": own, "full": learning.MIXERS["full, 1 head"], "window": learning.MIXERS["window"]}
settings = learning.Settings(steps=200, texts=2048)

for name, mixer in mixers.items():
    outcome = learning.train(mixer, learning.QUESTIONS["passkey"], seed=0, settings=settings)
    print(f"{name}: {outcome.accuracy:.0%} right after {outcome.steps} steps, {outcome.parameters:,} parameters")
