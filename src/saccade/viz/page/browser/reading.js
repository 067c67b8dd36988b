// Single weights of a head: exact if they were recorded, otherwise bounds from the cells of a map.

import { DECADES, weightsOf } from "./levels.js";
import { number, say } from "./words.js";

const SHOWN = 24; // maximum number of cells listed for a row of a map

/** The data of one head: the description of its layer, its map and its strongest weights. */
export class Reading {
  constructor(layer, small, close) {
    this.layer = layer;
    this.close = close;
    this.map = close?.map ?? small;
    this.weights = this.map && weightsOf(this.map.top, this.map.signed);
  }

  /** Return `[weight, whether it is exact]`; the weight is NaN if the pair is masked, and null if it is unknown. */
  at(query, key) {
    const { close, map, layer } = this;
    for (const [list, own, other] of [[close?.rows, query, key], [close?.columns, key, query]]) {
      for (let i = own * list?.k; i < (own + 1) * list?.k; i++) if (list.names[i] === other) return [list.weights[i], true];
    }
    if (!map) return close?.isWhole ? [0, true] : [null, false];
    const row = Math.floor((query * map.rows) / layer.queries), column = Math.floor((key * map.columns) / layer.keys);
    const weight = this.weights[map.levels[row * map.columns + column]];
    if (close?.isWhole) return [Number.isNaN(weight) && this.isExact ? NaN : 0, true];
    return [weight, this.isExact];
  }

  /** Describe a weight. For a cell of several pairs, only its largest weight or its total weight is known. */
  describe(query, key, language) {
    const [weight, isExact] = this.at(query, key);
    if (weight === null) return say(language, "notKept");
    if (Number.isNaN(weight)) return say(language, "hiddenPair");
    if (isExact) return number(weight);
    if (this.layer.how !== "max") return `${say(language, "ofCell")} ${number(weight)}`;
    return `${say(language, "atMost")} ${number(weight || this.map.top / 10 ** DECADES)}`;
  }

  /** Whether each cell of the map is a single pair of tokens. */
  get isExact() {
    return Boolean(this.map) && this.map.rows === this.layer.queries && this.map.columns === this.layer.keys;
  }

  /** Return the keys that a query attends to, strongest first. */
  ofQuery(query) {
    const found = fromList(this.close?.rows, query);
    return found ?? this.fromMap(query, this.layer.queries, this.layer.keys, (map, row, at) => map.levels[row * map.columns + at]);
  }

  /** Return the queries that attend to a key, strongest first. */
  ofKey(key) {
    const found = fromList(this.close?.columns, key);
    return found ?? this.fromMap(key, this.layer.keys, this.layer.queries, (map, column, at) => map.levels[at * map.columns + column], true);
  }

  fromMap(token, count, others, levelAt, isColumn = false) {
    const { map } = this;
    if (!map) return [];
    const [own, across] = isColumn ? [map.columns, map.rows] : [map.rows, map.columns];
    const line = Math.floor((token * own) / count), found = [];
    for (let at = 0; at < across; at++) {
      const weight = this.weights[levelAt(map, line, at)];
      if (!weight) continue; // masked, or 0
      const start = Math.ceil((at * others) / across), stop = Math.ceil(((at + 1) * others) / across);
      found.push({ start, stop, weight, isExact: this.isExact });
    }
    found.sort((one, other) => Math.abs(other.weight) - Math.abs(one.weight));
    return found.slice(0, SHOWN);
  }
}

function fromList(list, token) {
  if (!list?.k) return null;
  const found = [];
  for (let i = token * list.k; i < (token + 1) * list.k; i++) {
    if (list.names[i] >= 0) found.push({ start: list.names[i], stop: list.names[i] + 1, weight: list.weights[i], isExact: true });
  }
  return found.sort((one, other) => Math.abs(other.weight) - Math.abs(one.weight));
}
