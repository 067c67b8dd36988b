// HTML elements. All text is set with textContent, so that data is never parsed as markup.

/**
 * @param {string} tag
 * @param {object} [given] properties; `on` contains listeners, `data` and `aria` contain attributes
 * @param {...(Node|string)} children
 */
export function make(tag, given = {}, ...children) {
  const { on = {}, data = {}, aria = {}, ...properties } = given;
  const element = Object.assign(document.createElement(tag), properties);
  for (const [name, listener] of Object.entries(on)) element.addEventListener(name, listener);
  for (const [name, value] of Object.entries(data)) element.dataset[name] = value;
  for (const [name, value] of Object.entries(aria)) element.setAttribute(name === "role" ? name : `aria-${name}`, value);
  element.append(...children);
  return element;
}

/** Create a drop-down list. @param {[string, string][]} options values and their labels */
export function choice(label, options, value, onChange) {
  const list = make("select", { on: { change: () => onChange(list.value) } });
  list.append(...options.map(([own, said]) => make("option", { value: own, textContent: said })));
  list.value = value;
  return make("label", {}, make("span", { textContent: label }), list);
}

export function button(label, onClick, given = {}) {
  return make("button", { type: "button", textContent: label, on: { click: onClick }, ...given });
}
