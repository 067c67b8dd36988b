// All heads, as a table of layers × heads or as a list sorted by a measure.

import { colourOf, css, inkOn, palette } from "./colours.js";
import { make } from "./dom.js";
import { likeness, weightsOf, withoutSinks } from "./levels.js";
import { meaningOf, nameOf, number, say } from "./words.js";

const KINDS = { sink: "first_mass", previous: "previous_mass", induction: "induction_mass", broad: "relative_entropy" };

/** Return the kinds of heads that can be searched for, each with the measure that ranks it. */
export function kindsOf(side) {
  const known = new Set(side.measures.map((one) => one.name));
  return Object.fromEntries(Object.entries(KINDS).filter(([, measure]) => known.has(measure)));
}

/** Return a measure of every head, as one list per layer; for a comparison, the second recording minus the first. */
export function valuesOf(page, by) {
  if (by === "likeness") return page.likeness ?? [];
  const of = (side) => side.layers.map((layer) => layer.values[by] ?? Array(layer.heads).fill(null));
  if (page.state.now.side !== "difference") return of(page.side);
  const [one, other] = page.sides.map(of);
  return other.map((row, layer) => row.map((value, head) => {
    const first = one[layer]?.[head];
    return value === null || first === null || first === undefined ? null : value - first;
  }));
}

/** Return the similarity of each head's map to the selected head's map. */
export async function likenesses(side, layer, head) {
  const own = await side.small(layer, head), found = [];
  for (const [place, described] of side.layers.entries()) {
    found.push([]);
    for (let other = 0; other < described.heads; other++) found[place].push(likeness(own, await side.small(place, other)));
  }
  return found;
}

export class Heads {
  constructor(page, element) {
    this.page = page;
    this.element = element;
  }

  draw() {
    const { page } = this, { now } = page.state;
    const values = valuesOf(page, now.by), known = values.flat().filter((value) => value !== null);
    const least = Math.min(...known), most = Math.max(...known), size = Math.max(Math.abs(least), Math.abs(most));
    this.tiles = [];
    const share = (value) => {
      if (value === null) return null;
      if (now.side === "difference" || least < 0) return size ? value / size : 0;
      return most > least ? (value - least) / (most - least) : 0;
    };
    const tile = (layer, head) => this.tile(layer, head, values[layer]?.[head] ?? null, share(values[layer]?.[head] ?? null));
    // Make tiles as large as fits in a row; if there are many heads, scroll instead of shrinking their maps further.
    const widest = Math.max(...page.side.layers.map((layer) => layer.heads)), room = (this.element.clientWidth - 44) / widest - 4;
    const [smallest, largest] = now.tiles === "maps" ? [16, 44] : [12, 20];
    this.element.style.setProperty("--tile", `${Math.min(largest, Math.max(smallest, Math.floor(room)))}px`);
    const focused = this.element.contains(this.element.getRootNode().activeElement);
    this.element.replaceChildren(now.order === "place" ? this.table(tile) : this.list(tile, values));
    this.scale(least, most, known.length);
    this.mark(focused);
    if (now.tiles === "maps") this.drawMaps();
  }

  table(tile) {
    const layers = this.page.side.layers, widest = Math.max(...layers.map((layer) => layer.heads));
    const language = this.page.language;
    const names = Array.from({ length: widest }, (_, head) => make("th", { textContent: head, scope: "col" }));
    const body = layers.map((layer, place) => {
      const cells = Array.from({ length: layer.heads }, (_, head) => make("td", {}, tile(place, head)));
      return make("tr", {}, make("th", { textContent: place, scope: "row", title: layer.name }), ...cells);
    });
    const corner = make("th", { textContent: `${say(language, "layer")} \\ ${say(language, "head")}`, scope: "col" });
    return make("table", { className: "grid" }, make("thead", {}, make("tr", {}, corner, ...names)), make("tbody", {}, ...body));
  }

  list(tile, values) {
    const sign = this.page.state.now.order === "most" ? -1 : 1;
    const order = values.flatMap((row, layer) => row.map((value, head) => ({ layer, head, value })));
    order.sort((one, other) => (one.value === null) - (other.value === null) || sign * (one.value - other.value));
    const items = order.map(({ layer, head, value }) => {
      const name = make("span", { textContent: `${layer}.${head}  ${number(value)}` });
      return make("li", {}, tile(layer, head), name);
    });
    return make("ol", { className: "list" }, ...items);
  }

  tile(layer, head, value, share) {
    const { language, state, theme } = this.page;
    const said = `${say(language, "layer")} ${layer}, ${say(language, "head")} ${head}: ${nameOf(language, state.now.by)} ${number(value)}`;
    const colour = colourOf(share, theme);
    const tile = make("button", {
      type: "button", title: said, aria: { label: said }, data: { layer, head }, tabIndex: -1,
      on: { click: () => state.set({ layer, head }) },
    });
    tile.style.background = css(colour);
    tile.style.color = inkOn(colour);
    if (this.page.side.layers[layer].close[head]) tile.classList.add("close");
    this.tiles.push(tile);
    return tile;
  }

  /** Frame the selected head. */
  mark(withFocus = false) {
    const { layer, head } = this.page.state.now;
    for (const tile of this.tiles) {
      const isChosen = Number(tile.dataset.layer) === layer && Number(tile.dataset.head) === head;
      tile.setAttribute("aria-pressed", String(isChosen));
      tile.tabIndex = isChosen ? 0 : -1;
      if (isChosen && withFocus) tile.focus({ preventScroll: true });
    }
  }

  /** Draw the colour scale with the numbers at its ends, and the meaning of the measure. */
  scale(least, most, count) {
    const { page } = this, { by } = page.state.now;
    const measure = page.side.measures.find((one) => one.name === by);
    const bar = make("i", { className: "bar" });
    const stops = Array.from({ length: 9 }, (_, i) => css(colourOf(least < 0 ? i / 4 - 1 : i / 8, page.theme)));
    bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    const [low, high] = least < 0 ? [-Math.max(-least, most), Math.max(-least, most)] : [least, most];
    const meaning = measure ? meaningOf(page.language, measure) : "";
    page.parts.scale.replaceChildren(count ? number(low) : "", count ? bar : "", count ? number(high) : "–", make("small", { textContent: meaning }));
  }

  /** Draw the small maps on the tiles. */
  async drawMaps() {
    const { page } = this, turn = (this.turn = {}), { now } = page.state;
    for (const tile of this.tiles) {
      const layer = Number(tile.dataset.layer), head = Number(tile.dataset.head), described = page.side.layers[layer];
      let map = await page.side.small(layer, head);
      if (this.turn !== turn || page.state.now.tiles !== "maps") return;
      if (!map) continue;
      if (now.sinks === "hidden") map = withoutSinks(map, described.sinks, described.keys);
      tile.replaceChildren(thumbnail(map, now.scale === "log", page.theme));
      tile.classList.add("map");
    }
  }
}

/** Return a canvas with one pixel for each cell of a map. */
export function thumbnail(map, isLog, theme) {
  const canvas = make("canvas", { width: map.columns, height: map.rows });
  const weights = weightsOf(map.top, map.signed), image = new ImageData(map.columns, map.rows);
  const highest = map.levels.reduce((most, level) => (level && Math.abs(weights[level]) > most ? Math.abs(weights[level]) : most), 0);
  const colours = palette(weights, highest, isLog, theme), pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < pixels.length; i++) pixels[i] = colours[map.levels[i]];
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
