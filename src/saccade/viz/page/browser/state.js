// The state of the view: one small object, stored in the fragment of the page's URL.

const START = {
  side: "0", // the recording: "0", "1", or "difference"
  layer: 0,
  head: 0,
  by: "", // the measure that colours heads
  order: "place", // or "most", "least"
  tiles: "colours", // or "maps"
  scale: "log", // or "linear"
  sinks: "shown", // or "hidden"
  view: null, // [first key, first query, keys, queries] of the map
  query: null, // the selected query
  key: null, // the selected key
  find: "",
  language: "", // "en", "zh"; "" is the browser's
  theme: "", // "light", "dark"; "" is the browser's
};

export class State {
  /** @param {object} given the initial state @param {boolean} inAddress whether the state is stored in the URL */
  constructor(given, inAddress) {
    this.now = { ...START, ...given };
    this.start = { ...this.now };
    this.inAddress = inAddress;
    this.listeners = [];
    if (inAddress) {
      this.read();
      window.addEventListener("hashchange", () => this.read() && this.tell(Object.keys(START)));
    }
  }

  /** Add a listener, which is called with the names of changed values. @param {(changed: Set<string>) => void} listener */
  listen(listener) {
    this.listeners.push(listener);
  }

  set(changes) {
    const names = Object.keys(changes).filter((name) => JSON.stringify(changes[name]) !== JSON.stringify(this.now[name]));
    if (!names.length) return;
    Object.assign(this.now, changes);
    if (this.inAddress) this.writeSoon();
    this.tell(names);
  }

  tell(names) {
    for (const listener of this.listeners) listener(new Set(names));
  }

  /** Write the URL after a pause, because browsers refuse frequent changes, such as one for each step of a pan. */
  writeSoon() {
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.write(), 150);
  }

  write() {
    const parameters = new URLSearchParams();
    for (const name of Object.keys(START)) {
      const own = this.now[name];
      if (JSON.stringify(own) !== JSON.stringify(this.start[name])) parameters.set(name, Array.isArray(own) ? own.join(",") : String(own ?? ""));
    }
    this.written = parameters.size ? `#${parameters}` : "#";
    window.history.replaceState(null, "", this.written);
  }

  /** Read the state from the URL; invalid values are ignored. */
  read() {
    if (window.location.hash === this.written) return false;
    const parameters = new URLSearchParams(window.location.hash.slice(1));
    const found = { ...this.start };
    for (const [name, text] of parameters) {
      const own = START[name];
      if (own === undefined) continue;
      if (name === "view") {
        const numbers = text.split(",").map(Number);
        if (numbers.length === 4 && numbers.every(Number.isFinite)) found.view = numbers;
      } else if (typeof own === "string") found[name] = text;
      else if (/^\d+$/.test(text)) found[name] = Number(text);
    }
    this.now = found;
    return true;
  }
}
