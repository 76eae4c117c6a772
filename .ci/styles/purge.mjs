// Write Tabler's style sheet without the rules that no page uses: node purge.mjs FILE
//
// `make styles` runs a copy of this file in var/styles, beside the packages that it imports.
// A class counts as used if its name occurs anywhere in a template, a script or a Python module.
import { writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { PurgeCSS } from "purgecss";

const ROOT = fileURLToPath(new URL("../../", import.meta.url));
const TABLER = fileURLToPath(new URL("node_modules/@tabler/core/dist/css/tabler.min.css", import.meta.url));
const SOURCES = ["templates/**/*.html", "static/js/*.js", "static/vendor/tabler/tabler.min.js", "{billing,console,jobs,storage}/**/*.py"];
// Elements of rendered Markdown, which occur in no template.
const ELEMENTS = /^(blockquote|code|dd|dl|dt|em|h[1-6]|hr|img|kbd|li|ol|p|pre|strong|table|tbody|td|th|thead|tr|ul)$/;
// Classes whose second part comes from a template variable, such as `alert-{{ notice.level }}`.
const COMPOSED = /^(alert|status)-/;

const [result] = await new PurgeCSS().purge({
  content: SOURCES.map((pattern) => ROOT + pattern),
  css: [TABLER],
  defaultExtractor: (text) => text.match(/[\w-]+/g) ?? [],
  safelist: [ELEMENTS, COMPOSED],
  keyframes: true,
});
const css = result.css.replace(/\n?\/\*# sourceMappingURL=.*?\*\//, "");
writeFileSync(process.argv[2], css.endsWith("\n") ? css : `${css}\n`);
