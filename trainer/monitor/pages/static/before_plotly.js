// Runs before plotly.js, so that it works under a policy without inline styles, and without a word in the console.
//
// plotly writes its rules into the sheet of an element of a certain id. Here it finds one whose sheet was constructed by
// script, which the policy allows. It also brings a style sheet for maps, which are not drawn here: that is left out.
"use strict";
(() => {
  const sheet = new CSSStyleSheet();
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  const holder = document.createElement("meta");
  holder.id = "plotly.js-style-global";
  Object.defineProperty(holder, "sheet", { value: sheet });
  document.head.append(holder);
  const { appendChild } = document.head;
  document.head.appendChild = node => {
    if (!(node instanceof HTMLStyleElement)) return appendChild.call(document.head, node);
    Object.defineProperty(node, "sheet", { value: sheet, configurable: true });
    return node;
  };
})();
