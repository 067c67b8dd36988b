// The page as a notebook widget; see anywidget.dev.

import { start } from "./page.js";

function render({ model, el }) {
  const root = document.createElement("div"), style = document.createElement("style");
  style.textContent = model.get("style");
  const shadow = el.attachShadow({ mode: "open" });
  root.style.height = `${model.get("height")}px`;
  root.tabIndex = 0;
  shadow.append(style, root);
  const parts = model.get("parts");
  start(root, (name) => parts[name], false);
}

export default { render };
