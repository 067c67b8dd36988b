// The page: its data, its state and its views.

import { drawHeadControls, drawHelp, drawMapControls, drawTop } from "./controls.js";
import { openData } from "./data.js";
import { make } from "./dom.js";
import { Heads, likenesses } from "./heads.js";
import { pressed } from "./keys.js";
import { difference, exactDifference, withoutSinks } from "./levels.js";
import { MapView } from "./map.js";
import { Reading } from "./reading.js";
import { State } from "./state.js";
import { drawStrongest } from "./strongest.js";
import { TextView } from "./text.js";
import { languageOf, meaningOf, nameOf, number, say } from "./words.js";

const OF_HEADS = ["side", "layer", "head", "by", "order", "tiles", "scale", "sinks", "language", "theme"];
const OF_MAP = ["side", "layer", "head", "sinks"];

export class Page {
  /** @param {HTMLElement} root container of the page @param {object} data its index @param {boolean} inAddress see State */
  constructor(root, data, inAddress) {
    Object.assign(this, { root, sides: data.sides, title: data.title, given: data, transient: null });
    this.state = new State(data.start ?? {}, inAddress);
    this.checkState();
    this.parts = skeleton(root, data);
    this.mapView = new MapView(this, this.parts.map);
    this.textView = new TextView(this, this.parts.texts);
    this.heads = new Heads(this, this.parts.heads);
    this.parts.find.addEventListener("input", () => this.state.set({ find: this.parts.find.value }));
    this.parts.find.addEventListener("keydown", (event) => event.key === "Enter" && this.nextFound(event.shiftKey ? -1 : 1));
    root.addEventListener("keydown", (event) => pressed(this, event) && event.preventDefault());
    if (inAddress) document.addEventListener("keydown", (event) => event.target === document.body && pressed(this, event) && event.preventDefault());
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.changed(new Set(["theme"])));
    this.state.listen((changed) => this.changed(changed));
    this.ready = this.changed(new Set(Object.keys(this.state.now))).then(() => this.reveal());
  }

  /** Correct values that do not exist on this page, because the URL may have been made for another page. */
  checkState() {
    const { now } = this.state, last = this.sides.length - 1;
    if (!["0", last ? "1" : "0", last ? "difference" : "0"].includes(now.side)) now.side = "0";
    if (!["light", "dark"].includes(now.theme)) now.theme = "";
    now.layer = Math.min(now.layer, this.side.layers.length - 1);
    now.head = Math.min(now.head, this.layer.heads - 1);
    const names = this.side.measures.map((one) => one.name);
    if (!names.includes(now.by) && !(now.by === "likeness" && this.likeness)) now.by = names.includes("entropy") ? "entropy" : (names[0] ?? "");
    if (now.query !== null && now.query >= this.layer.queries) now.query = null;
    if (now.key !== null && now.key >= this.layer.keys) now.key = null;
  }

  get side() {
    return this.sides[this.state.now.side === "1" ? 1 : 0];
  }

  get isDifference() {
    return this.state.now.side === "difference";
  }

  get layer() {
    return this.side.layers[this.state.now.layer];
  }

  get language() {
    return languageOf(this.state.now.language, this.given.language);
  }

  get theme() {
    const { theme } = this.state.now;
    return theme || (window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  }

  /** The query and key under the pointer or, if there are none, the selected ones. */
  get pointed() {
    const { query, key } = this.state.now;
    return this.transient ?? { query, key };
  }

  queryTokens = (query) => this.side.texts[this.layer.queryText].tokens[query + this.layer.first];
  keyTokens = (key) => this.side.texts[this.layer.keyText].tokens[key];

  /** Return the query and the key that correspond to a token of a text. */
  pairOf(text, token) {
    const { queryText, keyText, first, queries } = this.layer;
    const query = token - first;
    return { query: text === queryText && query >= 0 && query < queries ? query : null, key: text === keyText ? token : null };
  }

  /** Redraw everything that depends on the changed names. */
  async changed(names) {
    this.checkState();
    const has = (some) => some.some((name) => names.has(name)), { parts, root } = this;
    if (has(["view", "query", "key"])) this.mapView.draw();
    if (has(["query", "key"])) this.light();
    if (!has([...OF_HEADS, "find"])) return;
    root.dataset.theme = this.theme;
    root.lang = this.language === "zh" ? "zh-CN" : "en";
    if (has(["side", "language", "theme", "find"])) drawTop(this);
    if (has(["scale", "sinks", "language", "side"])) drawMapControls(this, parts.mapControls);
    if (has(["side", "by", "order", "tiles", "language"])) drawHeadControls(this, parts.headControls);
    if (has(["side", "by", "order", "tiles", "scale", "sinks", "language", "theme"])) this.heads.draw();
    else if (has(["layer", "head"])) this.heads.mark(parts.heads.contains(root.getRootNode().activeElement));
    if (has(["side", "layer", "language"])) this.textView.show();
    if (has(["side", "layer", "language", "find"])) this.showFound();
    if (has(OF_MAP)) await this.read();
    else if (has(["scale", "theme", "language"])) this.mapView.draw();
    this.describeHead();
    this.light();
    if (!parts.help.hidden) drawHelp(this, parts.help);
  }

  /** Load and show the selected head. */
  async read() {
    const { layer, head, sinks } = this.state.now, { side } = this;
    const maps = await Promise.all(this.sides.map((own) => this.mapOf(own, layer, head, sinks)));
    if (this.state.now.layer !== layer || this.state.now.head !== head || this.side !== side) return;
    const own = maps[this.sides.indexOf(side)];
    this.readings = maps.map(({ small, close }, place) => new Reading(this.sides[place].layers[layer], small, close));
    this.reading = this.readings[this.sides.indexOf(side)];
    this.message = null;
    let { map } = own;
    if (this.isDifference) {
      const closes = maps.map((one) => one.close), isWhole = closes.every((close) => close?.isWhole) && this.shownReadings.length === 2;
      map = isWhole ? exactDifference(closes, maps.map((one) => one.map), this.layer) : null;
      map ??= difference(maps[0].map, maps[1].map) ?? difference(maps[0].plain, maps[1].plain);
      if (!map) this.message = say(this.language, "unlike");
    }
    this.mapView.show(map);
  }

  async mapOf(side, layer, head, sinks) {
    const described = side.layers[layer];
    if (!described || head >= described.heads) return { map: null, small: null, close: null, plain: null };
    const [small, close] = await Promise.all([side.small(layer, head), side.closely(layer, head)]);
    const left = sinks === "hidden" ? described.sinks : [];
    const plain = small && withoutSinks(small, left, described.keys);
    return { map: close?.map ? withoutSinks(close.map, left, described.keys) : plain, small, close, plain };
  }

  /** Show the name and the measures of the selected head. */
  describeHead() {
    const { parts, layer, language } = this, { now } = this.state;
    parts.name.textContent = this.headName();
    const columns = this.sides.map((side) => [this.sides.length > 1 ? side.name : say(language, "head"), side.layers[now.layer]?.values]);
    if (this.sides.length === 1) columns.push([say(language, "uniform"), layer.uniform]);
    const rows = this.side.measures.map((measure) => {
      const row = make("tr", {}, make("th", { textContent: nameOf(language, measure.name), scope: "row", title: meaningOf(language, measure) }));
      row.append(...columns.map(([, values]) => make("td", { textContent: number(values?.[measure.name]?.[now.head]) })));
      return row;
    });
    const head = make("tr", {}, ...["", ...columns.map(([name]) => name)].map((text) => make("th", { textContent: text, scope: "col" })));
    parts.measures.replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
  }

  headName() {
    const { layer, language } = this, { now } = this.state, side = this.sides.length > 1 ? `, ${this.isDifference ? say(language, "difference") : this.side.name}` : "";
    return `${say(language, "layer")} ${now.layer} (${layer.name}), ${say(language, "head")} ${now.head}${side}: ${layer.queries} × ${layer.keys} ${say(language, "tokens")}`;
  }

  /** Readings of the selected recording, or of both in a comparison if their layers have the same shape. */
  get shownReadings() {
    const { layer } = this, all = this.isDifference ? this.readings : [this.reading];
    return all.filter((own) => own?.layer?.queries === layer.queries && own.layer.keys === layer.keys);
  }

  /** Describe one weight in words. */
  describePair(query, key) {
    const weights = this.shownReadings.map((reading) => reading.describe(query, key, this.language));
    return `${query + this.layer.first} “${this.queryTokens(query)}” → ${key} “${this.keyTokens(key)}”: ${weights.join(" | ")}`;
  }

  /** Highlight a query and a key while the pointer is over them. */
  point(pair) {
    this.transient = pair;
    this.light();
    this.mapView.draw();
  }

  light() {
    this.textView.light();
    drawStrongest(this, this.parts.strongest);
  }

  stepToken(by) {
    const { layer, side } = this, { now } = this.state, count = side.texts[layer.keyText].tokens.length;
    const at = now.key ?? (now.query === null ? (by > 0 ? -1 : count) : now.query + layer.first);
    this.choose(layer.keyText, Math.min(Math.max(0, at + by), count - 1));
  }

  /** Scroll the selected token into view. */
  reveal() {
    const { query, key } = this.state.now, { layer, textView } = this;
    if (query !== null) textView.reveal(layer.queryText, query + layer.first);
    else if (key !== null) textView.reveal(layer.keyText, key);
  }

  /** Select a token, and scroll it into view. */
  choose(text, token) {
    const pair = this.pairOf(text, token);
    this.state.set(pair);
    this.textView.reveal(text, token);
    this.mapView.reveal(pair.query, pair.key);
  }

  showFound() {
    this.found = this.textView.mark();
    this.foundAt = -1;
    this.parts.found.textContent = this.state.now.find ? `${this.found.length}` : "";
  }

  nextFound(by) {
    if (!this.found?.length) return;
    this.foundAt = (this.foundAt + by + this.found.length) % this.found.length;
    this.choose(...this.found[this.foundAt]);
    this.parts.found.textContent = `${this.foundAt + 1} ${say(this.language, "of")} ${this.found.length}`;
  }

  /** Compute the similarity of each head to the selected head. */
  async compareHeads() {
    const { layer, head } = this.state.now;
    this.likeness = await likenesses(this.side, layer, head);
    if (this.state.now.by === "likeness") this.heads.draw();
  }

  nextSide() {
    if (this.sides.length < 2) return;
    const order = ["0", "1", "difference"];
    this.state.set({ side: order[(order.indexOf(this.state.now.side) + 1) % 3] });
  }

  openHelp() {
    this.parts.help.hidden = false;
    drawHelp(this, this.parts.help);
    this.parts.help.querySelector("button").focus();
  }

  closeHelp() {
    this.parts.help.hidden = true;
  }
}

/** Create the empty sections of the page. */
function skeleton(root, data) {
  const parts = {}, part = (name, tag, given = {}, ...children) => (parts[name] = make(tag, given, ...children));
  const find = part("find", "input", { type: "search", aria: { label: "find" } });
  root.classList.add("saccade");
  root.replaceChildren(
    make("header", {}, make("h1", { textContent: data.title, dir: "auto" }), part("sides", "div", { className: "row" }),
      make("label", { className: "row" }, part("findLabel", "span"), find, part("found", "output")), part("live", "div", { className: "row" }), part("buttons", "div", { className: "row" })),
    make("section", { className: "heads" }, part("headsTitle", "h2"), part("headControls", "div", { className: "row" }), part("scale", "div", { className: "scale" }), part("heads", "div", { className: "scroll" })),
    make("section", { className: "map" }, part("name", "h2", { aria: { live: "polite" } }), part("mapControls", "div", { className: "row" }), part("map", "div", { className: "canvas" })),
    make("section", { className: "text" }, part("textTitle", "h2"), part("texts", "div", { className: "scroll texts", tabIndex: 0 })),
    make("section", { className: "numbers" }, part("weightsTitle", "h2"), part("strongest", "div", { aria: { live: "polite" } }), part("measures", "table", { className: "measures" })),
    part("help", "div", { className: "help", hidden: true, aria: { role: "dialog" } }),
  );
  return parts;
}

/**
 * Draw a page.
 * @param {HTMLElement} root
 * @param {(name: string) => string} part returns packed data by name
 * @param {boolean} inAddress whether the state is stored in the page's URL
 */
export async function start(root, part, inAddress) {
  return new Page(root, await openData(part), inAddress);
}
