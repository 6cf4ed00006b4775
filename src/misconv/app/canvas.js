// The image with a hole that can be painted: mouse, finger, pen or keyboard. The hole is one bit a pixel.
const canvas = element.querySelector("canvas");
const context = canvas.getContext("2d");
const range = element.querySelector("input");
const picture = new Image();
let width = 1, height = 1, scale = 1, hole = new Uint8Array(1), erasing = false;
let brush = null, painting = false, changed = false;

function decode(text, count) {
  const bytes = atob(text), bits = new Uint8Array(count);
  for (let i = 0; i < count; i++) bits[i] = (bytes.charCodeAt(i >> 3) >> (i & 7)) & 1;
  return bits;
}

function encode(bits) {
  const bytes = new Uint8Array((bits.length + 7) >> 3);
  bits.forEach((bit, i) => { bytes[i >> 3] |= bit << (i & 7); });
  let text = "";
  bytes.forEach((byte) => { text += String.fromCharCode(byte); });
  return btoa(text);
}

// In pixels of the image; at its least the brush hides the pixel it is on.
function radius() {
  const share = range.value / 100;
  return Math.max(0.5, share * share * Math.max(width, height) / 2);
}

function draw() {
  context.imageSmoothingEnabled = false;
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (!hole[y * width + x]) continue;
      context.fillStyle = (x + y) % 2 && scale < 8 ? "#e05cb4" : "#ce188c";
      context.fillRect(x * scale, y * scale, scale, scale);
      if (scale >= 8) {
        context.fillStyle = "#facdeb";
        context.fillRect((x + 0.5) * scale - 1.5, (y + 0.5) * scale - 1.5, 3, 3);
      }
    }
  }
  if (brush && (document.activeElement === canvas || painting)) {
    context.lineWidth = 3;
    for (const colour of ["#000", "#fff"]) {
      context.strokeStyle = colour;
      context.beginPath();
      context.arc(brush.x * scale, brush.y * scale, radius() * scale, 0, 7);
      context.stroke();
      context.lineWidth = 1;
    }
  }
}

// All pixels whose centre is under the brush on its way from one point to another.
function stroke(from, to) {
  const reach = radius(), dx = to.x - from.x, dy = to.y - from.y, length = dx * dx + dy * dy;
  const near = (v) => Math.floor(v);
  for (const point of [from, to]) {
    const x = near(point.x), y = near(point.y);
    if (x >= 0 && x < width && y >= 0 && y < height) mark(y * width + x);
  }
  for (let y = Math.max(0, near(Math.min(from.y, to.y) - reach)); y < Math.min(height, Math.max(from.y, to.y) + reach); y++) {
    for (let x = Math.max(0, near(Math.min(from.x, to.x) - reach)); x < Math.min(width, Math.max(from.x, to.x) + reach); x++) {
      const px = x + 0.5 - from.x, py = y + 0.5 - from.y;
      const t = length ? Math.min(1, Math.max(0, (px * dx + py * dy) / length)) : 0;
      if ((px - t * dx) ** 2 + (py - t * dy) ** 2 <= reach * reach) mark(y * width + x);
    }
  }
}

function mark(place) {
  const bit = erasing ? 0 : 1;
  if (hole[place] !== bit) { hole[place] = bit; changed = true; }
}

function send() {
  if (!changed) return;
  changed = false;
  props.value = { hole: encode(hole) };
  trigger("input");
}

function show(value) {
  if (!value || !value.image) return;
  width = value.width; height = value.height;
  hole = decode(value.hole, width * height);
  // Whole squares for pixels, so that what is painted and what is hidden agree at sight.
  scale = Math.max(1, Math.floor(480 / Math.max(width, height)));
  canvas.width = width * scale; canvas.height = height * scale;
  brush = { x: width / 2, y: height / 2 };
  changed = false;
  picture.onload = () => { draw(); canvas.dataset.shown = value.key; };
  picture.src = value.image;
}

function at(event) {
  const box = canvas.getBoundingClientRect();
  return { x: (event.clientX - box.left) / box.width * width, y: (event.clientY - box.top) / box.height * height };
}

canvas.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  event.preventDefault();
  canvas.focus({ preventScroll: true });
  canvas.setPointerCapture(event.pointerId);
  painting = true; brush = at(event);
  stroke(brush, brush); draw();
});
canvas.addEventListener("pointermove", (event) => {
  const next = at(event);
  if (painting) stroke(brush, next);
  brush = next; draw();
});
for (const name of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(name, () => { if (painting) { painting = false; draw(); send(); } });
}
canvas.addEventListener("keydown", (event) => {
  const step = Math.max(1, Math.round(radius()));
  const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
  if (event.key in moves) {
    const [x, y] = moves[event.key], before = brush;
    brush = { x: Math.min(width - 0.5, Math.max(0.5, brush.x + x)), y: Math.min(height - 0.5, Math.max(0.5, brush.y + y)) };
    if (event.shiftKey) stroke(before, brush);
  } else if (event.key === " ") {
    stroke(brush, brush);
  } else return;
  event.preventDefault(); draw();
});
canvas.addEventListener("keyup", send);
canvas.addEventListener("focus", draw);
canvas.addEventListener("blur", () => { send(); draw(); });
range.addEventListener("input", draw);

element.querySelectorAll("[data-tool]").forEach((button) => button.addEventListener("click", () => {
  const tool = button.dataset.tool;
  if (tool === "clear") { changed = hole.some((bit) => bit); hole.fill(0); draw(); send(); return; }
  erasing = tool === "erase";
  element.querySelectorAll("[aria-pressed]").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
}));

watch("value", () => show(props.value));
show(props.value);
