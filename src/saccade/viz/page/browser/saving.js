// Save the view as PNG or SVG, or its numbers as JSON.

import { make } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";

function download(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function nameOfFile(page, ending) {
  const { layer, head } = page.state.now;
  return `layer${layer}-head${head}.${ending}`;
}

/** Return the map with its labels on the page's background colour. */
function picture(page) {
  const { canvas } = page.mapView;
  const copy = make("canvas", { width: canvas.width, height: canvas.height }), context = copy.getContext("2d");
  context.fillStyle = getComputedStyle(page.root).backgroundColor;
  context.fillRect(0, 0, copy.width, copy.height);
  context.drawImage(canvas, 0, 0);
  return copy;
}

export function savePng(page) {
  picture(page).toBlob((blob) => download(nameOfFile(page, "png"), blob));
}

/** Save the map as SVG, with cells as an image and labels as text. */
export function saveSvg(page) {
  const { mapView } = page, { box, canvas } = mapView, ratio = canvas.width / canvas.clientWidth;
  const cells = make("canvas", { width: Math.round(box.w * ratio), height: Math.round(box.h * ratio) });
  cells.getContext("2d").drawImage(canvas, box.x * ratio, box.y * ratio, box.w * ratio, box.h * ratio, 0, 0, cells.width, cells.height);
  const style = getComputedStyle(page.root), svg = document.createElementNS(SVG, "svg");
  const add = (tag, given, text) => {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(given)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    svg.append(element);
  };
  svg.setAttribute("xmlns", SVG);
  svg.setAttribute("viewBox", `0 0 ${canvas.clientWidth} ${canvas.clientHeight + 24}`);
  add("rect", { width: "100%", height: "100%", fill: style.backgroundColor });
  add("image", { x: box.x, y: box.y, width: box.w, height: box.h, href: cells.toDataURL() });
  const pen = { save() {}, restore() {}, translate: (x, y) => (pen.at = [x, y]), rotate: (angle) => (pen.turn = angle), measureText: (text) => ({ width: 6.2 * text.length }) };
  pen.fillText = (text) => {
    const turn = pen.turn ? ` rotate(${(pen.turn * 180) / Math.PI})` : "", anchor = { left: "start", right: "end", center: "middle" }[pen.textAlign];
    add("text", { transform: `translate(${pen.at.map((one) => one.toFixed(1))})${turn}`, "text-anchor": anchor, "font-size": 11, "font-family": "sans-serif", fill: style.color }, text);
    pen.turn = 0;
  };
  mapView.names(pen);
  add("text", { x: 8, y: canvas.clientHeight + 16, "font-size": 12, "font-family": "sans-serif", fill: style.color }, page.headName());
  download(nameOfFile(page, "svg"), new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" }));
}

/** Save the numbers of the selected head and the selected tokens. */
export function saveJson(page) {
  const { now } = page.state, { layer, reading } = page, of = (values) => Object.fromEntries(Object.entries(values).map(([name, own]) => [name, own[now.head]]));
  const list = (found, tokens, first) => found.map(({ start, stop, weight, isExact }) => ({ start: start + first, stop: stop + first, token: tokens(start), weight, exact: isExact }));
  const contents = {
    schema: "saccade.report.head/1", title: page.title, recording: page.side.name, layer: layer.name, layerNumber: now.layer, head: now.head,
    queries: layer.queries, keys: layer.keys, values: of(layer.values), uniform: of(layer.uniform), sinks: layer.sinks,
    query: now.query === null ? null : { number: now.query + layer.first, token: page.queryTokens(now.query), looksAt: list(reading.ofQuery(now.query), page.keyTokens, 0) },
    key: now.key === null ? null : { number: now.key, token: page.keyTokens(now.key), lookedAtBy: list(reading.ofKey(now.key), page.queryTokens, layer.first) },
  };
  download(nameOfFile(page, "json"), new Blob([JSON.stringify(contents, null, 1)], { type: "application/json" }));
}
