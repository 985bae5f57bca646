// Runs at the end of a page of a report, and puts in its place what a person would find wrong there, as JSON.
"use strict";
{
  const wrong = [];
  const said = node => node.textContent.trim().slice(0, 60);
  const shown = rect => rect.width > 0 && rect.height > 0;
  const rectsOf = (node, from = 0, to = node.length) => {
    const range = document.createRange();
    range.setStart(node, from);
    range.setEnd(node, to);
    return [...range.getClientRects()].filter(shown);
  };

  for (const details of document.querySelectorAll("details")) details.open = true;
  draw(); // the page's own, which would else wait for a frame

  // Every text that is seen, with its lines. What a box scrolls to is cut where the box ends.
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.data.trim() || parent.closest("script, style, select, noscript, title")) continue;
    const rects = rectsOf(node);
    if (rects.length) texts.push({node, parent, rects});
  }

  for (const {node, parent} of texts) {
    if (!parent.closest("dt, th, summary, #bar button, h2")) continue;
    for (const word of node.data.matchAll(/[^\s/-]+/g)) {
      const rects = rectsOf(node, word.index, word.index + word[0].length);
      const length = rects.reduce((sum, rect) => sum + rect.width, 0);
      const room = (parent.closest(".card") || document.body).clientWidth - 64; // without paddings
      if (new Set(rects.map(rect => Math.round(rect.top))).size > 1 && length < room) wrong.push(`label broken within a word of ${Math.round(length)}, where there is room for ${room}: ${said(node)}`);
    }
  }

  const right = document.documentElement.clientWidth;
  for (const {node, parent, rects} of texts) {
    const frame = parent.closest(".card, .scroll, figure") || document.body;
    const box = frame.getBoundingClientRect();
    const end = frame.matches(".scroll") ? box.left + frame.scrollWidth : box.right;
    if (rects.some(rect => rect.left < box.left - 1 || rect.right > end + 1)) wrong.push(`outside of its frame: ${said(node)}`);
    if (!frame.matches(".scroll") && rects.some(rect => rect.right > right + 1)) wrong.push(`outside of the window: ${said(node)}`);
  }
  if (document.documentElement.scrollWidth > right) wrong.push(`the page is ${document.documentElement.scrollWidth} wide in a window of ${right}`);

  for (const [place, one] of texts.entries())
    for (const other of texts.slice(place + 1))
      for (const a of one.rects) for (const b of other.rects) {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left), high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 3) wrong.push(`one over the other: ${said(one.node)} | ${said(other.node)}`); // lines of text touch
      }

  const cards = [...document.querySelectorAll(".card")].map(card => card.getBoundingClientRect().height);
  const found = {window: innerWidth, texts: texts.length, cards, wrong: [...new Set(wrong)]};
  document.body.replaceChildren(Object.assign(document.createElement("pre"), {id: "found", textContent: JSON.stringify(found)}));
}
