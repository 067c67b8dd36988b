// The page's packed data (compressed, in base64), which is unpacked on first use.

/** @param {string} text base64 of a zlib stream @returns {Promise<Uint8Array>} */
async function inflate(text) {
  const raw = atob(text.trim());
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Convert float16 numbers to float32, times a factor. @param {Uint8Array} bytes @param {number} top */
function halvesOf(bytes, top) {
  const halves = new Uint16Array(bytes.buffer);
  const numbers = new Float32Array(halves.length);
  for (let i = 0; i < halves.length; i++) {
    const h = halves[i], exponent = (h >> 10) & 31, fraction = h & 1023;
    const size = exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
    numbers[i] = (h >> 15 ? -size : size) * top;
  }
  return numbers;
}

/** Reads values one after the other from an array of bytes. */
class Reader {
  /** @param {Uint8Array} bytes */
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  take(count) {
    this.at += count;
    return this.bytes.slice(this.at - count, this.at); // a copy, so that typed arrays are aligned
  }

  levels(rows, columns) {
    return this.take(rows * columns);
  }

  halves(count, top) {
    return halvesOf(this.take(2 * count), top);
  }

  /** Read indices; -1 marks a missing weight. */
  indices(count) {
    return Int32Array.from(new Uint32Array(this.take(4 * count).buffer), (one) => one - 1);
  }
}

/** One recording: its texts, its layers, and data that is unpacked on first use. */
export class Side {
  /**
   * @param {object} index descriptions of texts, layers and heads
   * @param {(name: string) => string} part returns packed data by name
   */
  constructor(index, part) {
    Object.assign(this, index);
    this.part = part;
    this.opened = new Map();
  }

  open(name) {
    if (!this.opened.has(name)) this.opened.set(name, inflate(this.part(name)));
    return this.opened.get(name);
  }

  /** Return a head's small map, or null if none was recorded. */
  async small(layer, head) {
    const described = this.layers[layer];
    if (!described.cells) return null;
    const [rows, columns] = described.cells, beside = described.sinkColumns.length;
    const bytes = await this.open(`maps-${layer}`);
    const start = head * rows * columns;
    const rest = described.heads * rows * columns + head * rows * beside;
    return {
      rows, columns, top: described.tops[head], signed: described.signed,
      levels: bytes.subarray(start, start + rows * columns),
      sinkColumns: described.sinkColumns,
      beside: bytes.subarray(rest, rest + rows * beside),
    };
  }

  /** Return a head's details (large map, strongest weights, attention received by keys), or null if the page has none. */
  async closely(layer, head) {
    const described = this.layers[layer], close = described.close[head];
    if (!close) return null;
    const key = `closely ${layer} ${head}`;
    if (!this.opened.has(key)) this.opened.set(key, this.open(`head-${layer}-${head}`).then((b) => read(described, close, b)));
    return this.opened.get(key);
  }
}

function read(described, close, bytes) {
  const from = new Reader(bytes);
  const found = { map: null, rows: null, columns: null, received: null };
  if (close.cells) {
    const [rows, columns] = close.cells;
    const levels = from.levels(rows, columns);
    const beside = from.levels(rows, close.sinkColumns.length);
    found.map = { rows, columns, top: close.fineTop, signed: described.signed, levels, beside, sinkColumns: close.sinkColumns };
  }
  if (close.k) {
    const rows = described.queries * close.k, columns = described.keys * close.back;
    found.rows = { k: close.k, weights: from.halves(rows, close.top), names: from.indices(rows) };
    found.columns = { k: close.back, weights: from.halves(columns, close.top), names: from.indices(columns) };
  }
  if (close.mostReceived !== undefined) found.received = from.halves(described.keys, close.mostReceived);
  found.isWhole = Boolean(close.whole);
  return found;
}

/** Open a page's data: its index and its recordings. @param {(name: string) => string} part */
export async function openData(part) {
  const index = JSON.parse(new TextDecoder().decode(await inflate(part("index"))));
  index.sides = index.sides.map((side, place) => new Side(side, (name) => part(`${place}-${name}`)));
  return index;
}
