// Shows what a mark says: on hover beside the pointer, on click and by arrow keys below its chart.
"use strict";
(() => {
  const tip = document.getElementById("tip");

  function place(x, y) {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), innerWidth - box.width - 8);
    const top = y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18;
    tip.style.left = left + "px";
    tip.style.top = Math.max(8, top) + "px";
  }

  function middle(mark) {
    const box = mark.getBoundingClientRect();
    return (box.left + box.right) / 2;
  }

  for (const chart of document.querySelectorAll(".chart")) {
    const detail = chart.closest("section").querySelector(".detail");
    const rows = [...chart.querySelectorAll(".row")]
      .map((row) => [...row.querySelectorAll(".mark")])
      .filter((row) => row.length);
    let chosen = null;

    function choose(mark) {
      if (chosen) chosen.classList.remove("on");
      chosen = mark;
      if (!mark) return;
      mark.classList.add("on");
      if (detail) detail.textContent = mark.dataset.tip;
    }

    function adjacent(key) {
      const at = rows.findIndex((row) => row.includes(chosen));
      if (at < 0) return rows[0][0];
      const row = rows[at];
      const place = row.indexOf(chosen);
      if (key === "ArrowLeft") return row[Math.max(0, place - 1)];
      if (key === "ArrowRight") return row[Math.min(row.length - 1, place + 1)];
      if (key === "Home") return row[0];
      if (key === "End") return row[row.length - 1];
      const next = rows[at + (key === "ArrowUp" ? -1 : 1)];
      if (!next) return chosen;
      const x = middle(chosen);
      return next.reduce((a, b) => (Math.abs(middle(b) - x) < Math.abs(middle(a) - x) ? b : a));
    }

    chart.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { choose(null); tip.hidden = true; return; }
      if (!/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key) || !rows.length) return;
      event.preventDefault();
      choose(adjacent(event.key));
      tip.hidden = true;  // it would cover the marks around it; the line below says the same
    });
    chart.addEventListener("click", (event) => choose(event.target.closest(".mark")));
    chart.addEventListener("blur", () => { tip.hidden = true; });
    chart.addEventListener("pointermove", (event) => {
      const mark = event.target.closest(".mark");
      if (!mark) { tip.hidden = true; return; }
      tip.textContent = mark.dataset.tip;
      place(event.clientX, event.clientY);
    });
    chart.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
})();
