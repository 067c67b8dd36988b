// Colour scales with evenly decreasing lightness, so that they are readable without hue.

const MAGMA = ["#fcfdbf", "#fecd90", "#fe9f6d", "#f7705c", "#de4968", "#b73779", "#8c2981", "#641a80", "#3b0f70", "#150e37"];
const BLUES = ["#dff1ec", "#bfe5c6", "#8dd3be", "#58b7cd", "#2f8dbe", "#1464a5", "#084081"];

/** @param {string} hex */
function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function between(steps, t) {
  const at = Math.min(Math.max(t, 0), 1) * (steps.length - 1), low = Math.min(Math.floor(at), steps.length - 2);
  return steps[low].map((channel, i) => channel + (at - low) * (steps[low + 1][i] - channel));
}

const SCALES = {
  light: { up: ["#ffffff", ...MAGMA].map(channels), down: ["#ffffff", ...BLUES].map(channels), hidden: channels("#d3d8da") },
  dark: {
    up: ["#101014", ...MAGMA.slice(0, -1).reverse()].map(channels),
    down: ["#101014", ...BLUES.slice().reverse()].map(channels),
    hidden: channels("#33363d"),
  },
};

/** Return the colour at t on the scale: 0 for no weight, 1 for the largest; below 0 for negative weights. */
export function colourOf(t, theme) {
  if (t === null || Number.isNaN(t)) return SCALES[theme].hidden;
  return t < 0 ? between(SCALES[theme].down, -t) : between(SCALES[theme].up, t);
}

export function css(colour) {
  return `rgb(${colour.map(Math.round).join(" ")})`;
}

/** Return black or white, whichever has more contrast with a colour. */
export function inkOn([red, green, blue]) {
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#16161a" : "#ffffff";
}

/** Return a weight's position on the colour scale, from 0 to 1, negated for negative weights; log scales cover four decades. */
export function shareOf(weight, top, isLog) {
  if (Number.isNaN(weight)) return NaN;
  const size = top > 0 ? Math.min(Math.abs(weight) / top, 1) : 0;
  const t = isLog ? Math.max(0, 1 + Math.log10(size) / 4) : size;
  return weight < 0 ? -t : t || 0;
}

/** Return the colour of each level, in the four-byte format of a canvas. */
export function palette(weights, top, isLog, theme) {
  const bytes = new Uint8ClampedArray(1024);
  weights.forEach((weight, level) => bytes.set([...colourOf(shareOf(weight, top, isLog), theme).map(Math.round), 255], 4 * level));
  return new Uint32Array(bytes.buffer);
}
