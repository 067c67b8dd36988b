// Elements of the page. Text is set as text: nothing from outside is ever read as markup.

/**
 * @param {string} tag
 * @param {object} [given] properties; `on` are listeners, `data` and `aria` are attributes
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

/** A list to choose from. @param {[string, string][]} options values and what they are called */
export function choice(label, options, value, onChange) {
  const list = make("select", { on: { change: () => onChange(list.value) } });
  list.append(...options.map(([own, said]) => make("option", { value: own, textContent: said })));
  list.value = value;
  return make("label", {}, make("span", { textContent: label }), list);
}

export function button(label, onClick, given = {}) {
  return make("button", { type: "button", textContent: label, on: { click: onClick }, ...given });
}
