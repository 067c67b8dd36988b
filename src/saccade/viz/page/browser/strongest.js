// The selected tokens' strongest weights as a table, which is readable without colours.

import { make } from "./dom.js";
import { number, say } from "./words.js";

const ROWS = 12;

/** Draw tables of the keys that the query attends to, and of the queries that attend to the key. */
export function drawStrongest(page, element) {
  const { query, key } = page.pointed, { language, reading, layer } = page;
  if (!reading || (query === null && key === null)) {
    element.replaceChildren(make("p", { className: "hint", textContent: say(language, "pointAt") }));
    return;
  }
  if (!reading.map && !reading.close?.rows) {
    element.replaceChildren(make("p", { className: "hint", textContent: `${say(language, "notKept")}: ${say(language, "howToKeep")}` }));
    return;
  }
  const tables = page.shownReadings.flatMap((own) => {
    const whose = page.isDifference ? `${page.sides[page.readings.indexOf(own)].name}: ` : "", found = [];
    if (query !== null) {
      const title = `${whose}${query + layer.first} “${page.queryTokens(query)}” ${say(language, "looksAt")}`;
      found.push(table(page, title, "at", own.ofQuery(query), page.keyTokens, 0));
    }
    if (key !== null) {
      const title = `${whose}${key} “${page.keyTokens(key)}” ${say(language, "lookedAtBy")}`;
      found.push(table(page, title, "from", own.ofKey(key), page.queryTokens, layer.first));
    }
    return found;
  });
  element.replaceChildren(...tables);
}

function table(page, title, kind, found, tokens, first) {
  const { language } = page, isHidden = page.state.now.sinks === "hidden" && kind === "at";
  const hidden = new Set(isHidden ? page.layer.sinks : []);
  const rows = found.filter((one) => !hidden.has(one.start) || one.stop - one.start > 1).slice(0, ROWS);
  const most = rows.length ? Math.abs(rows[0].weight) : 1;
  const body = rows.map(({ start, stop, weight, isExact }) => {
    const bar = make("i");
    bar.style.width = `${(60 * Math.abs(weight)) / most}px`;
    const isOne = stop - start === 1;
    const name = isOne ? String(start + first) : `${start + first}–${stop - 1 + first}`;
    const text = isOne ? tokens(start) : `${tokens(start)} … ${tokens(stop - 1)}`;
    const said = isExact ? number(weight) : `${page.layer.how === "max" ? "≤" : "Σ"} ${number(weight)}`;
    return make("tr", {}, make("td", { textContent: name }), make("td", { textContent: text, dir: "auto" }), make("td", {}, bar, said));
  });
  if (!rows.length) body.push(make("tr", {}, make("td", { colSpan: 3, textContent: say(language, "none") })));
  return make("table", { className: `strongest ${kind}` }, make("caption", { textContent: title }), make("tbody", {}, ...body));
}
