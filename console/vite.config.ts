import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

export default defineConfig({
  plugins: [svelte()],
  // No module is preloaded by an inline script, and no file is inlined into a page: the content policy allows neither.
  build: { outDir: "dist", modulePreload: { polyfill: false }, assetsInlineLimit: 0, chunkSizeWarningLimit: 500 },
});
