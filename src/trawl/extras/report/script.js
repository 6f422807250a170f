"use strict";

// Zooms and moves the timeline. Without this script, it shows the whole trace.
for (const view of document.querySelectorAll("[data-units]")) {
  const units = Number(view.dataset.units);
  const microseconds = Number(view.dataset.microseconds);
  const lanes = view.querySelectorAll(".dense");
  const drawings = view.querySelectorAll(".lane svg");
  const ticks = view.querySelectorAll(".x-ticks span");
  const controls = view.parentElement.querySelector(".controls");
  const range = controls.querySelector("output");
  const narrowest = units / 2000;
  let start = 0;
  let width = units;

  function time(value, digits) {
    const [size, unit] = value >= 1e6 ? [1e6, "s"] : value >= 1e3 ? [1e3, "ms"] : [1, "µs"];
    return value === 0 ? "0" : `${Number((value / size).toPrecision(digits))} ${unit}`;
  }

  function show() {
    width = Math.min(units, Math.max(narrowest, width));
    start = Math.min(units - width, Math.max(0, start));
    for (const drawing of drawings) {
      drawing.viewBox.baseVal.x = start;
      drawing.viewBox.baseVal.width = width;
    }
    // Few enough spans are in view to tell them apart.
    for (const lane of lanes) {
      lane.classList.toggle("zoomed", (lane.dataset.spans * width) / units < 400);
    }
    // The more is enlarged, the more digits tell two ticks apart.
    const digits = 4 + Math.ceil(Math.log10(units / width));
    const at = (part) => time(((start + width * part) / units) * microseconds, digits);
    ticks.forEach((tick, index) => { tick.textContent = at(index / (ticks.length - 1)); });
    range.textContent = `${at(0)} to ${at(1)}`;
  }

  // Enlarges by a factor; the place at a part of the width stays where it is.
  function zoom(factor, part) {
    const next = Math.min(units, Math.max(narrowest, width / factor));
    start += (width - next) * part;
    width = next;
    show();
  }

  function move(parts) {
    start += width * parts;
    show();
  }

  function all() {
    start = 0;
    width = units;
    show();
  }

  const actions = {
    in: () => zoom(2, 0.5),
    out: () => zoom(0.5, 0.5),
    left: () => move(-0.25),
    right: () => move(0.25),
    all,
  };
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" };

  function part(event) {
    const box = drawings[0].getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  }

  controls.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) actions[button.dataset.do]();
  });
  view.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    actions[keys[event.key]]();
  });
  view.addEventListener("wheel", (event) => {
    // Without the key, the wheel scrolls the page.
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY < 0 ? 1.25 : 0.8, part(event));
  }, { passive: false });
  view.addEventListener("dblclick", (event) => zoom(2, part(event)));

  let dragged = null;
  view.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    dragged = event.clientX;
    view.setPointerCapture(event.pointerId);
  });
  view.addEventListener("pointermove", (event) => {
    if (dragged === null) return;
    const box = drawings[0].getBoundingClientRect();
    move((dragged - event.clientX) / box.width);
    dragged = event.clientX;
  });
  for (const end of ["pointerup", "pointercancel"]) {
    view.addEventListener(end, () => { dragged = null; });
  }

  view.dataset.live = "";
  view.tabIndex = 0;
  view.setAttribute("aria-label", "Timeline. Arrow keys move it, plus and minus zoom, 0 shows all.");
  controls.hidden = false;
  show();
}
