// The page as a standalone file with embedded data; a live page reloads itself.

import { button } from "./dom.js";
import { start } from "./page.js";
import { WORDS, say } from "./words.js";

async function open() {
  const root = document.querySelector("main");
  try {
    const page = await start(root, (name) => document.querySelector(`script[data-part="${name}"]`).textContent, true);
    await page.ready;
    if (page.given.live) keepReloading(page);
    window.saccade = Object.assign(page, { words: WORDS }); // for use in the browser's console
    document.body.dataset.ready = "true";
  } catch (error) {
    root.textContent = `This page could not be read: ${error.message}`;
    throw error;
  }
}

/** Reload the page regularly while the recording is running, unless the reader pauses it. */
function keepReloading(page) {
  const { live } = page.given, { parts, language } = page;
  const later = () => window.setTimeout(() => window.location.reload(), 1000 * live);
  let timer = later();
  const toggle = button(say(language, "pause"), () => {
    window.clearTimeout(timer);
    timer = timer ? 0 : later();
    toggle.textContent = say(language, timer ? "pause" : "goOn");
  });
  parts.live.replaceChildren(`${say(language, "live")} ${live} ${say(language, "seconds")}`, toggle);
}

open();
