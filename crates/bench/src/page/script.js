"use strict";
// Tips beside the pointer, names that hide their lines, columns that sort. Nothing else depends on it.
const tip = document.getElementById("tip");
const show = (point, x, y) => {
  tip.textContent = point.dataset.tip;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - box.width - 6)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18) + "px";
};
for (const point of document.querySelectorAll(".point")) {
  point.querySelector("title").remove();
  point.addEventListener("pointermove", (e) => show(point, e.clientX, e.clientY));
  point.addEventListener("pointerleave", () => { tip.hidden = true; });
  point.addEventListener("focus", () => {
    const box = point.getBoundingClientRect();
    show(point, box.right, box.top);
  });
  point.addEventListener("blur", () => { tip.hidden = true; });
}
for (const name of document.querySelectorAll(".legend li[data-kind]")) {
  name.addEventListener("click", () => {
    const off = name.classList.toggle("off");
    const lines = name.closest("figure").querySelectorAll(`.series[data-kind="${name.dataset.kind}"]`);
    for (const line of lines) line.classList.toggle("off", off);
  });
}
for (const head of document.querySelectorAll("th")) {
  head.addEventListener("click", () => {
    const at = [...head.parentNode.children].indexOf(head);
    const body = head.closest("table").tBodies[0];
    const down = head.dataset.down !== "1";
    head.dataset.down = down ? "1" : "0";
    const value = (row) => {
      const cell = row.children[at];
      return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
    };
    const order = (a, b) => {
      const [x, y] = [value(a), value(b)];
      const numbers = typeof x === "number" && typeof y === "number";
      return numbers ? y - x : String(x).localeCompare(String(y));
    };
    const rows = [...body.rows].sort((a, b) => (down ? order(a, b) : order(b, a)));
    body.append(...rows);
  });
}
