// The controls at the top of the page, above the heads and above the map, and the help.

import { button, choice, make } from "./dom.js";
import { kindsOf } from "./heads.js";
import { saveJson, savePng, saveSvg } from "./saving.js";
import { nameOf, say } from "./words.js";

/** Draw the controls above the heads: the measure that colours them, their order, and a search by kind. */
export function drawHeadControls(page, element) {
  const { state, language } = page, { now } = state, word = (name) => say(language, name);
  const measures = page.side.measures.map(({ name }) => [name, nameOf(language, name)]);
  measures.push(["likeness", nameOf(language, "likeness")]);
  const find = async (kind) => {
    if (kind === "like") await page.compareHeads();
    const by = kind === "like" ? "likeness" : kindsOf(page.side)[kind];
    if (by) state.set({ by, order: "most" });
  };
  const kinds = [["", word("choose")], ...Object.keys(kindsOf(page.side)).map((kind) => [kind, word(kind)]), ["like", word("like")]];
  element.replaceChildren(
    choice(word("colouredBy"), measures, now.by, async (by) => {
      if (by === "likeness") await page.compareHeads();
      state.set({ by });
    }),
    choice(word("order"), [["place", word("inPlace")], ["most", word("most")], ["least", word("least")]], now.order, (order) => state.set({ order })),
    choice(word("tiles"), [["colours", word("colours")], ["maps", word("maps")]], now.tiles, (tiles) => state.set({ tiles })),
    choice(word("findHeads"), kinds, "", find),
  );
}

/** Draw the controls above the map: colour scale, sinks, zoom and file formats. */
export function drawMapControls(page, element) {
  const { state, language, mapView } = page, { now } = state, word = (name) => say(language, name);
  const saved = { png: savePng, svg: saveSvg, json: saveJson };
  element.replaceChildren(
    choice(word("scale"), [["log", word("log")], ["linear", word("linear")]], now.scale, (scale) => state.set({ scale })),
    choice(word("sinksHere"), [["shown", word("shown")], ["hidden", word("hidden")]], now.sinks, (sinks) => state.set({ sinks })),
    button("+", () => mapView.zoom(1.5), { title: word("zoomIn"), aria: { label: word("zoomIn") } }),
    button("−", () => mapView.zoom(1 / 1.5), { title: word("zoomOut"), aria: { label: word("zoomOut") } }),
    button(word("whole"), () => state.set({ view: null })),
    choice(word("save"), [["", word("choose")], ["png", "PNG"], ["svg", "SVG"], ["json", "JSON"]], "", (kind) => {
      saved[kind]?.(page);
      drawMapControls(page, element);
    }),
  );
}

/** Draw the controls at the top: recording, text search, language, theme and help. */
export function drawTop(page) {
  const { state, language, parts } = page, { now } = state, word = (name) => say(language, name);
  const sides = page.sides.map((side, place) => [String(place), side.name]);
  if (page.sides.length > 1) sides.push(["difference", `${page.sides[1].name} − ${page.sides[0].name}`]);
  parts.sides.replaceChildren(...(sides.length > 1 ? [choice(word("compare"), sides, now.side, (side) => state.set({ side }))] : []));
  parts.findLabel.textContent = word("findText");
  parts.find.value = now.find;
  parts.buttons.replaceChildren(
    button(word("language"), () => state.set({ language: language === "en" ? "zh" : "en" })),
    button("◐", () => state.set({ theme: page.theme === "dark" ? "light" : "dark" }), { title: word("theme"), aria: { label: word("theme") } }),
    button("?", () => page.openHelp(), { title: word("help"), aria: { label: word("help") } }),
  );
  for (const [name, element] of Object.entries({ heads: parts.headsTitle, text: parts.textTitle, weights: parts.weightsTitle })) element.textContent = word(name);
}

/** Draw the list of keyboard shortcuts. */
export function drawHelp(page, element) {
  const rows = say(page.language, "keys").map(([key, what]) => make("tr", {}, make("th", { textContent: key, scope: "row" }), make("td", { textContent: what })));
  element.replaceChildren(make("h2", { textContent: say(page.language, "help") }), make("table", {}, ...rows), button(say(page.language, "close"), () => page.closeHelp()));
}
