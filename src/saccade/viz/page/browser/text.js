// The texts: pointing at a token highlights the tokens that it attends to and those that attend to it.

import { make } from "./dom.js";
import { say } from "./words.js";

const WINDOW = 12000; // maximum number of tokens laid out at once
const BLOCK = 256;
const LIT = 600; // maximum number of tokens highlighted at once

export class TextView {
  constructor(page, element) {
    this.page = page;
    this.element = element;
    this.lit = [];
    this.texts = [];
    element.addEventListener("pointerover", (event) => this.over(event.target));
    element.addEventListener("pointerleave", () => page.point(null));
    element.addEventListener("click", (event) => {
      const place = this.placeOf(event.target);
      if (place) page.state.set(page.pairOf(place.text, place.token));
    });
  }

  /** Lay out the texts of the selected layer, unless they are already shown. */
  show() {
    const { page } = this, { queryText, keyText } = page.layer, wanted = [...new Set([queryText, keyText])];
    const key = `${page.sides.indexOf(page.side)} ${wanted} ${page.language}`;
    if (key === this.shown) return;
    this.shown = key;
    this.texts = wanted.map((text) => new Text(page, text, wanted.length === 1 ? "" : say(page.language, text === queryText ? "ofQueries" : "ofKeys")));
    this.element.replaceChildren(...this.texts.map((text) => text.element));
    this.mark();
  }

  placeOf(target) {
    const span = target.closest?.("[data-token]");
    if (!span) return null;
    return { text: this.texts.find((own) => own.element.contains(span)).number, token: Number(span.dataset.token) };
  }

  over(target) {
    const place = this.placeOf(target);
    this.page.point(place && this.page.pairOf(place.text, place.token));
  }

  /** Highlight the keys that the query attends to, and the queries that attend to the key. */
  light() {
    for (const span of this.lit) {
      span.style.background = span.style.boxShadow = "";
      span.classList.remove("at", "from");
    }
    this.lit = [];
    const { page } = this, { query, key } = page.pointed, { layer, reading } = page;
    if (!reading) return;
    if (query === null && key === null) return this.lightReceived();
    const hidden = new Set(page.state.now.sinks === "hidden" ? layer.sinks : []);
    if (query !== null) {
      this.lightAll(layer.keyText, 0, reading.ofQuery(query), hidden, (span, share) => (span.style.background = `rgb(47 127 214 / ${share})`));
      this.of(layer.queryText)?.at(query + layer.first, (span) => this.add(span, "at"));
    }
    if (key !== null) {
      this.lightAll(layer.queryText, layer.first, reading.ofKey(key), new Set(), (span, share) => {
        span.style.boxShadow = `inset 0 -4px 0 rgb(217 115 13 / ${share})`;
      });
      this.of(layer.keyText)?.at(key, (span) => this.add(span, "from"));
    }
  }

  lightAll(text, first, found, hidden, put, isLog = this.page.state.now.scale === "log") {
    const seen = found.filter((one) => !hidden.has(one.start) || one.stop - one.start > 1);
    const top = seen.length ? Math.abs(seen[0].weight) : 1;
    let left = LIT;
    for (const { start, stop, weight } of seen) {
      const part = Math.abs(weight) / top, share = isLog ? Math.max(0, 1 + Math.log10(part) / 3) : part;
      if (share < 0.03) continue;
      for (let token = start; token < stop && left > 0; token++, left--) {
        this.of(text)?.at(token + first, (span) => {
          put(span, (0.85 * share).toFixed(3));
          this.lit.push(span);
        });
      }
    }
  }

  /** Highlight the attention that all keys receive; used if no token is selected. */
  lightReceived() {
    const received = this.page.reading.close?.received, { layer, state } = this.page;
    if (!received) return;
    const hidden = new Set(state.now.sinks === "hidden" ? layer.sinks : []);
    const found = [...received.entries()].filter(([key]) => !hidden.has(key)).sort((one, other) => other[1] - one[1]).slice(0, LIT);
    this.lightAll(layer.keyText, 0, found.map(([start, weight]) => ({ start, stop: start + 1, weight })), hidden, (span, share) => {
      span.style.background = `rgb(217 115 13 / ${(share * 0.5).toFixed(3)})`;
    }, false);
  }

  add(span, name) {
    span.classList.add(name);
    this.lit.push(span);
  }

  of(number) {
    return this.texts.find((text) => text.number === number);
  }

  /** Scroll a token into view. */
  reveal(number, token) {
    this.of(number)?.reveal(token);
  }

  /** Frame the tokens that contain the search text. Return [text, token] for each match. */
  mark() {
    const looked = this.page.state.now.find.toLowerCase(), found = [];
    for (const text of this.texts) found.push(...text.mark(looked).map((token) => [text.number, token]));
    return found;
  }
}

class Text {
  constructor(page, number, title) {
    this.number = number;
    this.page = page;
    const { tokens, special } = page.side.texts[number];
    this.tokens = tokens;
    this.special = new Set(special);
    this.found = new Set();
    // Separate the words visually if the tokens do not contain spaces.
    const hasSpaces = tokens.some((token) => /^ .|. $|↵/.test(token));
    this.body = make("div", { className: hasSpaces ? "tokens" : "tokens apart", dir: "auto" });
    this.element = make("section", {}, ...(title ? [make("h3", { textContent: title })] : []), this.body);
    this.layOut(0);
  }

  /** Lay out the tokens from `start` on, in blocks that the browser skips while they are not visible. */
  layOut(start) {
    const { language } = this.page, stop = Math.min(this.tokens.length, start + WINDOW);
    this.start = start;
    this.spans = [];
    const blocks = [];
    const more = (to, word) => make("button", { type: "button", textContent: `${say(language, word)} …`, on: { click: () => this.layOut(to) } });
    if (start > 0) blocks.push(more(Math.max(0, start - WINDOW), "earlier"));
    for (let first = start, next; first < stop; first = next) {
      next = this.blockEnd(first, stop);
      const block = make("p");
      for (let token = first; token < next; token++) {
        const span = make("span", { textContent: this.tokens[token], data: { token } });
        if (this.special.has(token)) span.className = "special";
        if (this.found.has(token)) span.classList.add("found");
        this.spans.push(span);
        block.append(span, this.tokens[token].endsWith("↵") ? make("br") : "\u200b");
      }
      blocks.push(block);
    }
    if (stop < this.tokens.length) blocks.push(more(stop, "later"));
    this.body.replaceChildren(...blocks);
  }

  /** Return the end of a block, which is not inside a word if words are separated by spaces. */
  blockEnd(first, stop) {
    for (let token = first + BLOCK; token < Math.min(stop, first + 2 * BLOCK); token++) {
      if (this.tokens[token].startsWith(" ") || this.tokens[token - 1].endsWith("↵")) return token;
    }
    return Math.min(stop, first + BLOCK);
  }

  at(token, use) {
    const span = this.spans[token - this.start];
    if (span) use(span);
  }

  reveal(token) {
    if (token < this.start || token >= this.start + this.spans.length) this.layOut(Math.max(0, token - WINDOW / 2));
    this.at(token, (span) => span.scrollIntoView({ block: "nearest" }));
  }

  /** Mark all matches of a search text, which may span several tokens. Return the first token of each match. */
  mark(looked) {
    this.found.forEach((token) => this.at(token, (span) => span.classList.remove("found")));
    this.found = new Set();
    const first = [];
    if (!looked) return first;
    const starts = [];
    let whole = "";
    for (const token of this.tokens) {
      starts.push(whole.length);
      whole += token.toLowerCase();
    }
    for (let at = whole.indexOf(looked); at >= 0; at = whole.indexOf(looked, at + 1)) {
      let token = last(starts, at);
      first.push(token);
      for (; token < starts.length && starts[token] < at + looked.length; token++) this.found.add(token);
    }
    this.found.forEach((token) => this.at(token, (span) => span.classList.add("found")));
    return [...new Set(first)];
  }
}

/** Return the index of the last number in an ascending list that is at most `most`. */
function last(ascending, most) {
  let low = 0, high = ascending.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (ascending[middle] <= most) low = middle;
    else high = middle - 1;
  }
  return low;
}
