// One head's map, with zooming and panning over a pyramid of pooled maps, and single weights where they are known.

import { colourOf, css, palette, shareOf } from "./colours.js";
import { make } from "./dom.js";
import { pyramid, weightsOf } from "./levels.js";
import { say } from "./words.js";

const MARGIN = { left: 84, top: 74, right: 8, bottom: 8 };
const LABELLED = 11; // minimum pixels per token for drawing token labels
const SINGLE = 2; // and for drawing single weights
const LOOKS = "#2f7fd6", LOOKED_AT = "#d9730d";

export class MapView {
  constructor(page, element) {
    this.page = page;
    this.canvas = make("canvas", { tabIndex: 0, aria: { role: "img" } });
    this.tip = make("div", { className: "tip", hidden: true });
    element.append(this.canvas, this.tip);
    this.levels = [];
    this.images = new Map();
    this.fingers = new Map();
    this.listen();
    new ResizeObserver(() => this.resize()).observe(element);
  }

  /** Show a map, or a message if it is null. */
  show(map) {
    this.levels = map ? pyramid(map) : [];
    this.images.clear();
    const weights = map && weightsOf(map.top, map.signed);
    this.top = map ? map.levels.reduce((most, level) => (level ? Math.max(most, Math.abs(weights[level])) : most), 0) : 0;
    this.draw();
  }

  get layer() {
    return this.page.layer;
  }

  get view() {
    return this.page.state.now.view ?? [0, 0, this.layer.keys, this.layer.queries];
  }

  /** The map's rectangle on the canvas. */
  get box() {
    const { clientWidth, clientHeight } = this.canvas;
    return { x: MARGIN.left, y: MARGIN.top, w: clientWidth - MARGIN.left - MARGIN.right, h: clientHeight - MARGIN.top - MARGIN.bottom };
  }

  resize() {
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.canvas.clientWidth * ratio);
    this.canvas.height = Math.round(this.canvas.clientHeight * ratio);
    this.draw();
  }

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.paint();
    });
  }

  paint() {
    const { page, canvas, box } = this, ratio = window.devicePixelRatio || 1;
    if (!page.side || box.w <= 0 || box.h <= 0) return;
    const context = canvas.getContext("2d"), style = getComputedStyle(canvas);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
    canvas.setAttribute("aria-label", say(page.language, "mapSays"));
    const ink = style.color, [x, y, w, h] = this.view, { layer } = this;
    const pixels = { x: box.w / w, y: box.h / h };
    if (this.levels.length) {
      context.save();
      context.beginPath();
      context.rect(box.x, box.y, box.w, box.h);
      context.clip();
      this.paintCells(context, pixels);
      this.paintChosen(context, pixels);
      context.restore();
    } else {
      context.fillStyle = ink;
      const lines = page.message ? [page.message] : [say(page.language, "notKept"), say(page.language, "howToKeep")];
      lines.forEach((line, row) => context.fillText(line, box.x + 8, box.y + 20 + 16 * row));
    }
    context.strokeStyle = ink;
    context.globalAlpha = 0.3;
    context.strokeRect(box.x - 0.5, box.y - 0.5, box.w + 1, box.h + 1);
    context.globalAlpha = 1;
    context.fillStyle = ink;
    context.font = `11px ${style.fontFamily}`;
    this.names(context);
    this.frames = (this.frames ?? 0) + 1;
  }

  paintCells(context, pixels) {
    const { box, layer, page } = this, [x, y, w, h] = this.view, base = this.levels[0];
    const perKey = base.columns / layer.keys, perQuery = base.rows / layer.queries; // cells per token
    const cell = Math.min(pixels.x / perKey, pixels.y / perQuery) * (window.devicePixelRatio || 1);
    const place = Math.min(Math.max(0, Math.ceil(Math.log2(1 / cell))), this.levels.length - 1), size = 2 ** place;
    const single = this.page.reading?.close?.rows;
    const isSingle = single?.k && !page.isDifference && base.columns < layer.keys && Math.min(pixels.x, pixels.y) >= SINGLE;
    context.imageSmoothingEnabled = false;
    context.globalAlpha = isSingle ? 0.25 : 1;
    context.drawImage(
      this.image(place), (x * perKey) / size, (y * perQuery) / size, (w * perKey) / size, (h * perQuery) / size, box.x, box.y, box.w, box.h,
    );
    context.globalAlpha = 1;
    if (isSingle) this.paintSingle(context, pixels, single);
  }

  /** Paint the strongest weights in view, each at its own pair of tokens. */
  paintSingle(context, pixels, { k, names, weights }) {
    const { box, page, layer } = this, [x, y, w, h] = this.view, { now } = page.state;
    const hidden = new Set(now.sinks === "hidden" ? layer.sinks : []);
    for (let query = Math.max(0, Math.floor(y)); query < Math.min(layer.queries, y + h); query++) {
      for (let i = query * k; i < (query + 1) * k; i++) {
        const key = names[i];
        if (key < x - 1 || key > x + w || key < 0 || hidden.has(key)) continue;
        context.fillStyle = css(colourOf(shareOf(weights[i], this.top, now.scale === "log"), page.theme));
        context.fillRect(box.x + (key - x) * pixels.x, box.y + (query - y) * pixels.y, Math.ceil(pixels.x), Math.ceil(pixels.y));
      }
    }
  }

  image(place) {
    const { scale } = this.page.state.now, key = `${place} ${scale} ${this.page.theme}`;
    if (!this.images.has(key)) {
      const { rows, columns, levels, top, signed } = this.levels[place];
      const canvas = make("canvas", { width: columns, height: rows }), image = new ImageData(columns, rows);
      const colours = palette(weightsOf(top, signed), this.top, scale === "log", this.page.theme);
      const pixels = new Uint32Array(image.data.buffer);
      for (let i = 0; i < pixels.length; i++) pixels[i] = colours[levels[i]];
      canvas.getContext("2d").putImageData(image, 0, 0);
      this.images.set(key, canvas);
    }
    return this.images.get(key);
  }

  /** Frame the row of the selected query and the column of the selected key, or those under the pointer. */
  paintChosen(context, pixels) {
    const { box, page } = this, [x, y] = this.view, { query, key } = page.pointed;
    const line = (at, start, size, isColumn, colour) => {
      const from = (isColumn ? box.x : box.y) + (at - start) * size, width = Math.max(size, 1);
      context.strokeStyle = colour;
      context.lineWidth = 1;
      if (isColumn) context.strokeRect(from - 0.5, box.y - 1, width + 1, box.h + 2);
      else context.strokeRect(box.x - 1, from - 0.5, box.w + 2, width + 1);
    };
    if (query !== null) line(query, y, pixels.y, false, LOOKS);
    if (key !== null) line(key, x, pixels.x, true, LOOKED_AT);
  }

  /** Write the labels of both axes. @param {object} pen a canvas context, or an object with its text methods */
  names(pen) {
    const [x, y, w, h] = this.view, { box, layer, page } = this;
    this.name(pen, { start: x, count: w, all: layer.keys, pixels: box.w / w, tokens: page.keyTokens, isColumn: true });
    this.name(pen, { start: y, count: h, all: layer.queries, pixels: box.h / h, tokens: page.queryTokens, isColumn: false });
  }

  /** Write the tokens along one axis, or their indices if they are too close together to be readable. */
  name(context, { start, count, all, pixels, tokens, isColumn }) {
    const { box } = this, named = pixels >= LABELLED;
    const step = named ? 1 : niceStep(count / Math.max(1, (isColumn ? box.w : box.h) / 56));
    const first = Math.ceil(Math.max(0, start) / step) * step;
    for (let token = first; token < Math.min(all, start + count); token += step) {
      const at = (token - start + 0.5) * pixels;
      const label = named ? cut(context, tokens(token), MARGIN.left - 12) : token.toLocaleString("en");
      context.save();
      if (isColumn) {
        context.translate(box.x + at + 3, box.y - 6);
        context.rotate(named ? -Math.PI / 2.6 : 0);
        context.textAlign = named ? "left" : "center";
      } else {
        context.translate(box.x - 6, box.y + at + 4);
        context.textAlign = "right";
      }
      context.fillText(label, 0, 0);
      context.restore();
    }
  }

  listen() {
    const { canvas, page } = this, point = (event) => {
      const bounds = canvas.getBoundingClientRect();
      return { x: event.clientX - bounds.left - this.box.x, y: event.clientY - bounds.top - this.box.y };
    };
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const { x, y } = point(event);
      this.zoom(2 ** (-event.deltaY / (event.ctrlKey ? 60 : 300)), x / this.box.w, y / this.box.h);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.fingers.set(event.pointerId, point(event));
      this.moved = 0;
    });
    canvas.addEventListener("pointermove", (event) => this.move(event.pointerId, point(event)));
    const up = (event) => {
      if (this.fingers.delete(event.pointerId) && this.moved < 4 && event.type === "pointerup") {
        const pair = this.pairAt(point(event));
        if (pair) page.state.set(pair);
      }
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => {
      this.tip.hidden = true;
      page.point(null);
    });
    canvas.addEventListener("dblclick", (event) => {
      const { x, y } = point(event);
      this.zoom(2, x / this.box.w, y / this.box.h);
    });
  }

  move(finger, to) {
    const from = this.fingers.get(finger);
    if (!from) return this.hover(to);
    const [x, y, w, h] = this.view, others = [...this.fingers].filter(([name]) => name !== finger).map(([, at]) => at);
    this.moved += Math.hypot(to.x - from.x, to.y - from.y);
    this.fingers.set(finger, to);
    if (others.length === 1) {
      const apart = (at) => Math.hypot(at.x - others[0].x, at.y - others[0].y) || 1;
      return this.zoom(apart(to) / apart(from), (to.x + others[0].x) / 2 / this.box.w, (to.y + others[0].y) / 2 / this.box.h);
    }
    if (this.moved >= 4) this.look(x - ((to.x - from.x) * w) / this.box.w, y - ((to.y - from.y) * h) / this.box.h, w, h);
  }

  pairAt({ x, y }) {
    const [left, top, w, h] = this.view, { box, layer } = this;
    const key = Math.floor(left + (x * w) / box.w), query = Math.floor(top + (y * h) / box.h);
    const isInside = x >= 0 && y >= 0 && x < box.w && y < box.h && key < layer.keys && query < layer.queries;
    return isInside ? { query, key } : null;
  }

  hover(at) {
    const pair = this.pairAt(at), { page, tip } = this;
    page.point(pair);
    tip.hidden = !pair;
    if (!pair) return;
    tip.textContent = page.describePair(pair.query, pair.key);
    tip.style.left = `${Math.min(at.x + this.box.x + 14, this.canvas.clientWidth - 180)}px`;
    tip.style.top = `${at.y + this.box.y + 16}px`;
  }

  /** Zoom by a factor around a point, given as fractions of the map's width and height. */
  zoom(factor, across = 0.5, down = 0.5) {
    const [x, y, w, h] = this.view, { keys, queries } = this.layer;
    const closest = Math.max(1, Math.min(w / Math.min(3, keys), h / Math.min(3, queries)));
    const times = Math.min(factor, closest);
    const [width, height] = [w / times, h / times];
    this.look(x + (w - width) * across, y + (h - height) * down, width, height);
  }

  /** Show a part of the map, in tokens, or the full map if the part would exceed it. */
  look(x, y, w, h) {
    const { keys, queries } = this.layer;
    const width = Math.min(w, keys), height = Math.min(h, queries);
    const left = Math.min(Math.max(0, x), keys - width), top = Math.min(Math.max(0, y), queries - height);
    const isWhole = width >= keys && height >= queries;
    this.page.state.set({ view: isWhole ? null : [left, top, width, height].map((one) => Number(one.toFixed(3))) });
  }

  pan(across, down) {
    const [x, y, w, h] = this.view;
    this.look(x + (across * w) / 8, y + (down * h) / 8, w, h);
  }

  /** Move the view so that a pair is visible. */
  reveal(query, key) {
    const [x, y, w, h] = this.view;
    const left = key === null || (key >= x && key < x + w) ? x : key - w / 2;
    const top = query === null || (query >= y && query < y + h) ? y : query - h / 2;
    if (left !== x || top !== y) this.look(left, top, w, h);
  }

}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return Math.max(1, [1, 2, 5, 10].find((times) => times * power >= least) * power);
}

function cut(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const characters = [...text];
  while (characters.length > 1 && context.measureText(`${characters.join("")}…`).width > width) characters.pop();
  return `${characters.join("")}…`;
}
