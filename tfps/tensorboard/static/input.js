// Mouse and keyboard of a timeline.

/** Makes a timeline's canvas react. */
export function listen(timeline) {
  const { canvas, options: { viewport } } = timeline;
  const keys = keysOf(timeline);
  let drag = null;
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    drag = { x: event.clientX, y: event.clientY, left: viewport.left, right: viewport.right, top: timeline.scroller.scrollTop, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const [x, y] = [event.clientX - drag.x, event.clientY - drag.y];
      drag.moved ||= Math.abs(x) + Math.abs(y) > 4;
      if (!drag.moved) return;
      viewport.show(drag.left - x / timeline.pixelsPerNs, drag.right - x / timeline.pixelsPerNs);
      timeline.scroller.scrollTop = drag.top - y;
    } else hover(timeline, ...point(event));
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) timeline.select(timeline.spanAt(...point(event)));
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => hover(timeline, -1, -1));
  canvas.addEventListener("dblclick", (event) => {
    const span = timeline.spanAt(...point(event));
    if (span >= 0) timeline.zoomTo(span);
  });
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) {
      event.preventDefault();
      viewport.zoom(Math.exp(Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY) / 240, 0.5)), point(event)[0] / timeline.width);
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      viewport.pan((event.deltaX || event.deltaY) / timeline.width);
    }
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
}

/** Key -> what it does while the canvas has the focus. */
function keysOf(timeline) {
  return {
    ArrowLeft: () => timeline.options.viewport.pan(-0.15),
    ArrowRight: () => timeline.options.viewport.pan(0.15),
    a: () => timeline.options.viewport.pan(-0.15),
    d: () => timeline.options.viewport.pan(0.15),
    "+": () => timeline.options.viewport.zoom(0.6),
    "=": () => timeline.options.viewport.zoom(0.6),
    w: () => timeline.options.viewport.zoom(0.6),
    "-": () => timeline.options.viewport.zoom(1 / 0.6),
    s: () => timeline.options.viewport.zoom(1 / 0.6),
    ArrowUp: () => (timeline.scroller.scrollTop -= 60),
    ArrowDown: () => (timeline.scroller.scrollTop += 60),
    0: () => timeline.options.viewport.fit(),
    Home: () => timeline.options.viewport.fit(),
    n: () => timeline.select(timeline.neighbour(1), true),
    p: () => timeline.select(timeline.neighbour(-1), true),
    j: () => timeline.select(timeline.across(1), true),
    k: () => timeline.select(timeline.across(-1), true),
    Enter: () => timeline.selected >= 0 && timeline.zoomTo(timeline.selected),
    f: () => timeline.selected >= 0 && timeline.setFocus(!timeline.focus),
    Escape: () => timeline.select(-1),
  };
}

function hover(timeline, x, y) {
  const span = timeline.spanAt(x, y);
  timeline.tip.hidden = span < 0;
  if (span >= 0) {
    timeline.tip.textContent = timeline.describe(span);
    timeline.tip.style.left = `${Math.min(timeline.labels.offsetWidth + x + 12, timeline.root.clientWidth - timeline.tip.offsetWidth - 4)}px`;
    timeline.tip.style.top = `${y + 18 + timeline.tip.offsetHeight > timeline.height ? y - timeline.tip.offsetHeight - 6 : y + 18}px`;
  }
  if (span !== timeline.hovered) {
    timeline.hovered = span;
    timeline.draw();
  }
}
