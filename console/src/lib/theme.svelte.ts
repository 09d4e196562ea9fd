/** Dark or light: what the system prefers, unless the user has chosen. */

type Theme = "light" | "dark";
const system = matchMedia("(prefers-color-scheme: dark)");
const stored = localStorage.getItem("regraft-theme");

export const theme = $state<{ name: Theme }>({
  name: stored === "dark" || stored === "light" ? stored : system.matches ? "dark" : "light",
});

export function apply(): void {
  document.documentElement.dataset.theme = theme.name;
}

export function toggle(): void {
  theme.name = theme.name === "dark" ? "light" : "dark";
  localStorage.setItem("regraft-theme", theme.name);
  apply();
}
