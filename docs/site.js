// What the theme leaves to the site: errors that readers paste find their section.

"use strict";

// The search box takes some punctuation for operators, as in "pserver:7070". Pasted text gets rid of it.
document.addEventListener("paste", (event) => {
  const box = event.target, text = event.clipboardData.getData("text");
  if (!box.matches?.(".md-search__input")) return;
  event.preventDefault();
  const words = text.match(/[A-Za-z_][\w.]+/g) ?? [];  // lone numbers of an error are on no page
  const plain = /[\s:+\-*~^]/.test(text) ? words.map((word) => word.replace(/\.+$/, "")).join(" ") : text;
  box.setRangeText(plain, box.selectionStart, box.selectionEnd, "end");
  box.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
}, true);

// The box on the page "Troubleshooting": which of its messages is in a pasted text?
(() => {
  const home = document.getElementById("tfps-find");
  if (!home) return;
  const HOLE = "…", LEAST = 6, SHOWN = 3;
  const plain = (text) => text.replace(/\s+/g, " ").trim();

  // Whether a text has all parts of a message, in their order.
  function has(text, parts) {
    let from = 0;
    return parts.every((part) => {
      const place = text.indexOf(part, from);
      from = place + part.length;
      return place >= 0;
    });
  }

  const known = [...document.querySelectorAll("table")]
    .filter((table) => table.querySelector("th").textContent === "message")
    .flatMap((table) => {
      let heading = table.closest(".md-typeset__scrollwrap") ?? table;
      while (heading && !/^H[23]$/.test(heading.tagName)) heading = heading.previousElementSibling;
      return [...table.querySelectorAll("td code")].map((code) => {
        const parts = plain(code.textContent).split(HOLE);
        return { code, heading, parts, letters: parts.join("").replace(/\W/g, "").length };
      });
    });

  // The messages in a text, those that explain most of it first.
  function find(text) {
    const given = plain(text);
    return known.filter(({ letters, parts }) => letters >= LEAST && has(given, parts))
      .sort((one, other) => other.letters - one.letters).slice(0, SHOWN);
  }

  home.innerHTML = `<label>Paste an error here
    <textarea rows="3" placeholder="tfps.errors.ConnectError: pserver 10.0.0.4:7070: no answer within 60 s"></textarea></label>
    <ol></ol>`;
  const list = home.querySelector("ol");
  home.querySelector("textarea").addEventListener("input", ({ target }) => {
    list.replaceChildren(...find(target.value).map(({ code, heading }) => {
      const item = document.createElement("li"), link = document.createElement("a");
      link.href = `#${heading.id}`;
      link.textContent = heading.firstChild.textContent;
      item.append(link, document.createElement("br"), code.cloneNode(true));
      return item;
    }));
    if (!list.children.length && target.value.trim()) {
      list.innerHTML = "<li>None of the messages below is in it. Is it an error of TensorFlow or Keras? Try the search box.</li>";
    }
  });
})();
