// Maps with one byte per cell: level 0 is masked, the others are weights on a logarithmic scale of six decades.

export const DECADES = 6;

/** Return the weight of each level; NaN for masked cells. */
export function weightsOf(top, signed) {
  const steps = signed ? 126 : 253;
  const size = (level) => (level <= 0 ? 0 : top * 10 ** (DECADES * ((level - 1) / steps - 1)));
  return Float64Array.from({ length: 256 }, (_, level) => {
    if (level === 0) return NaN;
    if (!signed) return size(level - 1);
    return level >= 128 ? size(level - 128) : -size(128 - level);
  });
}

/** Return the level of a weight, with the encoding of the packed maps. */
export function levelOf(weight, top, signed) {
  const steps = signed ? 126 : 253;
  if (Number.isNaN(weight)) return 0;
  const scaled = top > 0 ? Math.log10(Math.abs(weight) / top) / DECADES + 1 : -1;
  const level = scaled >= 0 ? Math.ceil(scaled * steps) + 1 : 0;
  return signed ? 128 + (weight < 0 ? -level : level) : 1 + level;
}

/** Return a map with the columns of sinks pooled without the sinks, or hidden if each column is one key; without
    sinks, the map itself. */
export function withoutSinks(map, sinks, keys) {
  if (!sinks.length) return map;
  const levels = map.levels.slice(), isExact = map.columns >= keys;
  map.sinkColumns.forEach((column, place) => {
    for (let row = 0; row < map.rows; row++) {
      const at = row * map.columns + column;
      levels[at] = isExact || levels[at] === 0 ? 0 : map.beside[row * map.sinkColumns.length + place];
    }
  });
  return { ...map, levels };
}

/** Return a map and its pooled versions, each half as large; a cell gets the value farthest from 0 of its four. */
export function pyramid(map) {
  const found = [map];
  while (found.at(-1).rows > 64 || found.at(-1).columns > 64) found.push(halved(found.at(-1)));
  return found;
}

function halved(map) {
  const rows = Math.ceil(map.rows / 2), columns = Math.ceil(map.columns / 2);
  const levels = new Uint8Array(rows * columns);
  for (let row = 0; row < map.rows; row++) {
    for (let column = 0; column < map.columns; column++) {
      const at = (row >> 1) * columns + (column >> 1), own = map.levels[row * map.columns + column];
      if (farther(own, levels[at], map.signed)) levels[at] = own;
    }
  }
  return { ...map, rows, columns, levels };
}

function farther(one, other, signed) {
  if (!signed) return one > other;
  return one !== 0 && (other === 0 || Math.abs(one - 128) > Math.abs(other - 128));
}

/** Return the second map minus the first, cell by cell, or null if their shapes differ. */
export function difference(first, second) {
  if (!first || !second || first.rows !== second.rows || first.columns !== second.columns) return null;
  const one = weightsOf(first.top, first.signed), other = weightsOf(second.top, second.signed);
  const values = Float64Array.from(first.levels, (level, i) => other[second.levels[i]] - one[level]);
  const top = values.reduce((most, value) => Math.max(most, Math.abs(value) || 0), 0);
  const levels = Uint8Array.from(values, (value) => levelOf(value, top, true));
  return { rows: first.rows, columns: first.columns, top, signed: true, levels, sinkColumns: [], beside: new Uint8Array(0) };
}

/** Return the difference of single weights, if all of both heads are known; pairs masked in both are hidden. */
export function exactDifference(closes, maps, { queries, keys }) {
  const values = new Float64Array(queries * keys);
  closes.forEach(({ rows: { k, names, weights } }, place) => {
    for (let i = 0; i < weights.length; i++) {
      if (names[i] >= 0) values[Math.floor(i / k) * keys + names[i]] += place ? weights[i] : -weights[i];
    }
  });
  const top = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  const isHidden = (i) => maps.every((map) => map.levels.length === values.length && map.levels[i] === 0);
  const levels = Uint8Array.from(values, (value, i) => (isHidden(i) ? 0 : levelOf(value, top, true)));
  return { rows: queries, columns: keys, top, signed: true, levels, sinkColumns: [], beside: new Uint8Array(0) };
}

/** Return the cosine similarity of the square roots of two maps' weights; it is below 0 only if some weights are. */
export function likeness(one, other) {
  if (!one || !other || one.levels.length !== other.levels.length) return null;
  const roots = [one, other].map((map) => weightsOf(map.top, map.signed).map((w) => Math.sign(w) * Math.sqrt(Math.abs(w)) || 0));
  let both = 0, first = 0, second = 0;
  for (let i = 0; i < one.levels.length; i++) {
    const x = roots[0][one.levels[i]], y = roots[1][other.levels[i]];
    both += x * y;
    first += x * x;
    second += y * y;
  }
  return first && second ? both / Math.sqrt(first * second) : 0;
}
