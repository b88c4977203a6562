// Light or dark: as asked for, else as TensorBoard is, else as the system is.

const FONT = "system-ui, 'Segoe UI', Roboto, sans-serif";
const LIGHT = {
  dark: false, font: FONT, background: "#ffffff", header: "#f1f3f5", text: "#1a1d21", muted: "#59616b", grid: "#9aa3ad",
  flow: "#c2185b", flowOther: "#8c959f",
};
const DARK = {
  dark: true, font: FONT, background: "#1e2125", header: "#2a2e34", text: "#eceff2", muted: "#a9b2bc", grid: "#6b747e",
  flow: "#ff5c9d", flowOther: "#8c959f",
};
const system = window.matchMedia("(prefers-color-scheme: dark)");

/** Colours of canvases. @param choice auto, light or dark. */
export function themeOf(choice) {
  return choice === "dark" || (choice === "auto" && isDark()) ? DARK : LIGHT;
}

function isDark() {
  const host = tensorBoard();
  return host ? host.classList.contains("dark-mode") : system.matches;
}

/** TensorBoard's body, which frames this page; null if it is on its own. */
function tensorBoard() {
  try {
    return window.parent === window ? null : window.parent.document.body;
  } catch {
    return null;
  }
}

export function watchTheme(changed) {
  const host = tensorBoard();
  if (host) new MutationObserver(changed).observe(host, { attributeFilter: ["class"] });
  system.addEventListener("change", changed);
}
