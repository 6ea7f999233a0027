// A click on a column's head sorts the table by it, a second one in reverse. Numbers sort as numbers, empty cells last.
const date = /^\d{4}-\d\d-\d\d$/;

document.addEventListener("click", (event) => {
  const head = event.target.closest("article table th");
  if (!head) return;
  const body = head.closest("table").tBodies[0];
  const column = head.cellIndex;
  const sign = head.dataset.order === "up" ? -1 : 1;
  head.dataset.order = sign === 1 ? "up" : "down";
  const text = (row) => row.cells[column].textContent.trim();
  const missing = (value) => value === "" || value === "-";
  const number = (value) => (date.test(value) ? NaN : parseFloat(value));
  const compare = (a, b) => {
    const [x, y] = [text(a), text(b)];
    if (missing(x) || missing(y)) return missing(x) - missing(y);
    const [n, m] = [number(x), number(y)];
    return sign * (isNaN(n) || isNaN(m) ? x.localeCompare(y) : n - m);
  };
  body.append(...[...body.rows].sort(compare));
});

// A date stays in one line.
document.addEventListener("DOMContentLoaded", () => {
  for (const cell of document.querySelectorAll("article td"))
    if (date.test(cell.textContent.trim())) cell.style.whiteSpace = "nowrap";
});
