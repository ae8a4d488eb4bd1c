// Making elements. Text only ever becomes text: nothing here parses markup.

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

export function setText(id, text) {
  const target = byId(id);
  if (target.textContent !== text) target.textContent = text;
}

// Fill a definition list with [name, value] pairs; elements stay while the names do.
export function fillFacts(list, facts) {
  const terms = [...list.querySelectorAll("dt")].map((term) => term.textContent);
  if (terms.join("\n") !== facts.map(([name]) => name).join("\n")) {
    list.replaceChildren(
      ...facts.map(([name]) => element("div", {}, element("dt", {}, name), element("dd"))),
    );
  }
  const values = list.querySelectorAll("dd");
  facts.forEach(([, value], i) => {
    if (values[i].textContent !== value) values[i].textContent = value;
  });
}
