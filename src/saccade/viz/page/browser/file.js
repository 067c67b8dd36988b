// The page as a file of its own: data in its elements, and a run that goes on reads it anew.

import { button } from "./dom.js";
import { start } from "./page.js";
import { WORDS, say } from "./words.js";

async function open() {
  const root = document.querySelector("main");
  try {
    const page = await start(root, (name) => document.querySelector(`script[data-part="${name}"]`).textContent, true);
    await page.ready;
    if (page.given.live) readAnew(page);
    window.saccade = Object.assign(page, { words: WORDS }); // for those who open the console
    document.body.dataset.ready = "true";
  } catch (error) {
    root.textContent = `This page could not be read: ${error.message}`;
    throw error;
  }
}

/** While a run goes on, read the file again and again, unless somebody says not to. */
function readAnew(page) {
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
