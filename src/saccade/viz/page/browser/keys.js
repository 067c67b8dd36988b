// Keyboard shortcuts of the page.

/** Handle a key press. @returns {boolean} whether the page has reacted to it */
export function pressed(page, event) {
  const { state, mapView } = page, { now } = state, target = event.composedPath()[0];
  if (event.ctrlKey || event.metaKey || event.altKey) return false;
  if (event.key === "Escape") {
    page.closeHelp();
    if (target.matches("input")) target.blur();
    state.set({ query: null, key: null });
    return true;
  }
  if (target.matches("input, select")) return false;
  const inMap = target === mapView.canvas, toggle = (name, one, other) => state.set({ [name]: now[name] === one ? other : one });
  const step = (layer, head) => {
    const { layers } = page.side, next = Math.min(Math.max(0, now.layer + layer), layers.length - 1);
    state.set({ layer: next, head: Math.min(Math.max(0, now.head + head), layers[next].heads - 1) });
  };
  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  if (event.key in arrows) {
    const [across, down] = arrows[event.key];
    if (inMap) mapView.pan(across, down);
    else if (target === page.root || target.matches("body, [data-head]")) step(down, across);
    else return false;
    return true;
  }
  const does = {
    "+": () => mapView.zoom(1.5), "=": () => mapView.zoom(1.5), "-": () => mapView.zoom(1 / 1.5), 0: () => state.set({ view: null }),
    ".": () => page.stepToken(1), ",": () => page.stepToken(-1),
    "/": () => page.parts.find.focus(),
    l: () => toggle("scale", "log", "linear"),
    s: () => toggle("sinks", "shown", "hidden"),
    m: () => toggle("tiles", "colours", "maps"),
    c: () => page.nextSide(),
    t: () => state.set({ theme: page.theme === "dark" ? "light" : "dark" }),
    "?": () => page.openHelp(),
  }[event.key];
  does?.();
  return Boolean(does);
}
