/** Editors of code and differences of code: CodeMirror in an open shadow root. It is a chunk of its own, which is loaded with the first of them. */

import { acceptCompletion, autocompletion, closeBrackets, closeBracketsKeymap, completionKeymap, type Completion as Option, type CompletionContext, type CompletionResult, startCompletion } from "@codemirror/autocomplete";
import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import { json, jsonLanguage } from "@codemirror/lang-json";
import { python, pythonLanguage } from "@codemirror/lang-python";
import { bracketMatching, HighlightStyle, indentOnInput, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { unifiedMergeView } from "@codemirror/merge";
import { search, searchKeymap } from "@codemirror/search";
import { Compartment, EditorState, type Extension, StateEffect, StateField, Text, type Transaction } from "@codemirror/state";
import { Decoration, type DecorationSet, EditorView, highlightSpecialChars, type KeyBinding, keymap, lineNumbers } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import { completions, type Completion } from "./complete";
import { read } from "./graders";
import type { Schemas } from "./schema";

export type Language = "json" | "python";
/** What an editor shows. `description` is the text that a screen reader reads after the label. */
type Shown = { language: Language; text: string; label: string; description: string; isInvalid: boolean };
/** What completion offers: the schemas of graders, and the fields of the rows. */
export type Offers = { schemas: () => Promise<Schemas>; fields: () => string[] };
export type Editor = { update: (shown: Shown) => void; show: (line: number) => void; destroy: () => void };
export type Compared = { before: string; after: string };
export type Comparison = { update: (compared: Compared) => void; destroy: () => void };

/** Characters that are not seen or turn the direction of the text, and so would hide what a source does. Tabs and ends of lines are not among them. */
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u2028\u2029\ufff9-\ufffc\p{Default_Ignorable_Code_Point}]/gu;
const hiddenOrBracket = new RegExp(`${HIDDEN.source}|⟨`, "gu");

/** A text with each hidden character as its number, like ⟨U+202E⟩. The bracket is written so too, else two texts that differ could look alike. */
const spelled = (text: string): string => text.replace(hiddenOrBracket, (one) => `⟨U+${one.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}⟩`);

const markLine = StateEffect.define<number>();
const marked = Decoration.line({ class: "cm-raised" });
/** The line that a traceback led to, until the text changes. */
const raised = StateField.define<DecorationSet>({
  create: () => Decoration.none,
  update(old, change) {
    const effect = change.effects.find((one) => one.is(markLine));
    if (effect) return Decoration.set(marked.range(effect.value));
    return change.docChanged ? Decoration.none : old;
  },
  provide: (field) => EditorView.decorations.from(field),
});

const colors = HighlightStyle.define([
  { tag: [tags.propertyName, tags.keyword, tags.definition(tags.function(tags.variableName))], color: "var(--accent-text)" },
  { tag: [tags.string, tags.special(tags.string)], color: "var(--good)" },
  { tag: [tags.number, tags.bool, tags.null], color: "var(--series-4)" },
  { tag: tags.comment, color: "var(--text-3)", fontStyle: "italic" },
]);

// Of the variables of the page, which reach into the shadow root, for both themes. CodeMirror's own colors are overridden.
const look = EditorView.theme({
  "&": { color: "var(--text)", fontSize: "0.87rem" },
  "&.cm-focused": { outline: "none" }, // the box around it has the outline
  ".cm-scroller": { fontFamily: 'ui-monospace, "Cascadia Mono", Menlo, monospace', lineHeight: "1.5", maxHeight: "40em" },
  ".cm-content": { padding: "0.5rem 0", caretColor: "var(--text)" },
  ".cm-line": { padding: "0 0.6rem" },
  ".cm-gutters": { background: "var(--page)", color: "var(--text-3)", border: "none", borderRight: "1px solid var(--line)", borderRadius: "6px 0 0 6px" },
  ".cm-lineNumbers .cm-gutterElement": { minWidth: "2.4em", padding: "0 0.5em" },
  "& .cm-raised": { background: "var(--removed)", boxShadow: "inset 3px 0 var(--bad)" },
  "&.cm-focused .cm-matchingBracket": { background: "var(--accent-soft)", outline: "1px solid var(--accent)" },
  "&.cm-focused .cm-nonmatchingBracket": { background: "var(--removed)" },
  "& .cm-searchMatch": { background: "var(--added)", outline: "1px solid var(--good)" },
  "& .cm-searchMatch-selected": { background: "var(--heat)" },
  "& .cm-panels": { background: "var(--surface)", color: "var(--text)" },
  "& .cm-panels-top": { borderBottom: "1px solid var(--line)" },
  "& .cm-textfield, & .cm-button": { font: "inherit", color: "inherit", background: "var(--page)", border: "1px solid var(--line)", borderRadius: "6px" },
  "& .cm-panel.cm-search [name=close]": { color: "inherit" },
  "& .cm-tooltip": { background: "var(--surface)", color: "var(--text)", border: "1px solid var(--line)" },
  "& .cm-tooltip.cm-tooltip-autocomplete > ul": { fontFamily: "inherit" },
  "& .cm-tooltip-autocomplete ul li[aria-selected]": { background: "var(--accent)", color: "var(--surface)" },
  "& .cm-completionDetail": { fontStyle: "normal", color: "inherit" },
  "& .cm-specialChar": { color: "var(--bad)" },
  "& .cm-completionMatchedText": { textDecoration: "none", fontWeight: "600" },
});

const tall = EditorView.theme({ ".cm-content, .cm-gutter": { minHeight: "14.5em" } });

// A sign beside each changed line, so that colors are not needed.
const differences = EditorView.theme({
  "&.cm-merge-b .cm-changedLine": { background: "var(--added)" },
  "& .cm-deletedChunk": { background: "var(--removed)", padding: "0 0.6rem" },
  "&.cm-merge-b .cm-changedText, &.cm-merge-b .cm-deletedChunk .cm-deletedText": { background: "none", textDecoration: "underline" },
  "& .cm-changeGutter": { width: "1.2em", padding: "0", textAlign: "center" },
  "&.cm-merge-b .cm-changedLineGutter": { background: "var(--added)", color: "var(--text)" },
  "& .cm-deletedLineGutter": { background: "var(--removed)", color: "var(--text)" },
  "& .cm-changedLineGutter::before": { content: '"+"' },
  "& .cm-deletedLineGutter::before": { content: '"−"' },
  // They would open by mouse only. The whole text is in the editor.
  "& .cm-collapsedLines": { background: "var(--accent-soft)", color: "var(--text-3)", padding: "0.1rem 0.6rem", pointerEvents: "none" },
  "& .cm-collapsedLines:before, & .cm-collapsedLines:after": { content: '"⋯"' },
});

/** How long Tab leaves the editor after Escape. Any other key ends it at once, so this need not be short for slow hands. */
const LEAVING = 60_000;

// Tab indents, and accepts what completion offers. Escape, then Tab leaves the editor, so that the keyboard is not trapped.
const tabs: KeyBinding[] = [
  { key: "Tab", run: acceptCompletion },
  indentWithTab,
  {
    key: "Escape",
    run: (view) => {
      view.setTabFocusMode(LEAVING);
      return true; // else CodeMirror sets its two seconds
    },
  },
];

/** Values of a template, from "{{": the answer, and the fields of the rows. */
function templateValues(context: CompletionContext, fields: string[]): CompletionResult | null {
  const before = context.matchBefore(/\{\{[\w. ]*$/);
  if (!before) return null;
  const after = /^\}{0,2}/.exec(context.state.sliceDoc(context.pos, context.pos + 2))![0].length;
  const value = (name: string, boost: number): Option => {
    const label = `{{${name}}}`;
    return { label, type: "variable", boost, apply: (view, _, from, to) => insert(view, { from, to: to + after, insert: label, cursor: from + label.length }) };
  };
  return { from: before.from, options: [value("sample.output_text", 1), ...fields.map((field) => value(`item.${field}`, 0))] };
}

/** Keys of `item` and `sample` in a Python source, from the quote. */
function keysOf(context: CompletionContext, fields: string[]): CompletionResult | null {
  const before = context.matchBefore(/\b(?:item|sample)\[["'][^"'\]]*$/);
  if (!before) return null;
  const names = before.text.startsWith("item") ? fields : ["output_text"];
  return { from: before.from + /["']/.exec(before.text)!.index + 1, options: names.map((label) => ({ label, type: "property" })) };
}

type Change = Pick<Completion, "from" | "to" | "insert" | "cursor">;

function insert(view: EditorView, { from, to, insert, cursor }: Change): void {
  view.dispatch({ changes: { from, to, insert }, selection: { anchor: cursor }, scrollIntoView: true, userEvent: "input.complete" });
}

/** Keys and values of a grader's JSON by the schemas of the API. */
function specification(context: CompletionContext, of: Schemas): CompletionResult | null {
  const text = context.state.doc.toString();
  const { pos } = context;
  const typed = context.matchBefore(/"?\w*$/)!;
  const isKey = /[{,]\s*$/.test(text.slice(0, typed.from));
  const quoted = /^\w*"?/.exec(text.slice(pos))![0].length;
  if (isKey) {
    if (!context.explicit && typed.from === pos) return null;
    const to = typed.text ? pos + quoted : pos;
    if (/^\s*:/.test(text.slice(to))) return null; // this key has a value
    // The schemas are asked about the text without the word that is being typed.
    const rest = text.slice(0, typed.from) + text.slice(to);
    const options = completions(of, rest, typed.from).map((one) => option(one, { ...one, to: to + one.to - typed.from }));
    return { from: typed.from + (typed.text.startsWith('"') ? 1 : 0), options };
  }
  const offered = completions(of, text, pos);
  const isValue = offered.some((one) => one.from < pos && pos < one.to);
  if (!isValue) return context.explicit ? { from: pos, options: offered.map((one) => option(one, one)) } : null;
  const start = offered[0]!.from + 1;
  const word = text.slice(start, pos);
  const isBegun = offered.some((one) => one.label.startsWith(word));
  if (!isBegun && !context.explicit) return null;
  return { from: isBegun ? start : pos, options: offered.map((one) => option(one, one)) }; // of a whole value, all others
}

const option = (one: Completion, change: Change): Option => ({
  label: one.label,
  type: "property",
  detail: one.isRequired ? "required" : undefined,
  boost: one.isRequired ? 1 : 0,
  apply: (view) => {
    insert(view, change);
    if (one.label.startsWith("type: ")) startCompletion(view); // with the type, its fields are known
  },
});

async function complete(context: CompletionContext, offers: Offers): Promise<CompletionResult | null> {
  const template = templateValues(context, offers.fields());
  if (template) return template;
  try {
    return specification(context, await offers.schemas());
  } catch {
    return null; // without the schemas there is nothing to offer, and nothing else is lost
  }
}

/** Replace what is selected by what is typed. Chromium, which would do it itself, makes an element with the style of the selection, which the content policy refuses. */
const typedOverSelection = EditorView.domEventHandlers({
  beforeinput(event, view) {
    const { from, to, empty } = view.state.selection.main;
    const text = event.data;
    if (event.inputType !== "insertText" || event.isComposing || view.composing || !text || empty) return false;
    const insert = (): Transaction => view.state.update(view.state.replaceSelection(text), { userEvent: "input.type", scrollIntoView: true });
    const isHandled = view.state.facet(EditorView.inputHandler).some((handle) => handle(view, from, to, text, insert)); // such as brackets around it
    if (!isHandled) view.dispatch(insert());
    return true;
  },
});

function viewIn(host: HTMLElement, state: EditorState): EditorView {
  // In a shadow root CodeMirror adds its style sheets as objects. In the document it would add elements, which the content policy refuses.
  const root = host.attachShadow({ mode: "open" });
  return new EditorView({ state, parent: root, root });
}

/** Show two texts line by line, without the equal lines far from a change. Hidden characters are spelled, because CodeMirror marks none in removed lines. */
export function compare(host: HTMLElement, compared: Compared): Comparison {
  const begin = ({ before, after }: Compared): EditorState =>
    EditorState.create({
      doc: spelled(after),
      extensions: [
        lineNumbers(),
        EditorView.lineWrapping,
        EditorState.readOnly.of(true),
        EditorView.editable.of(false),
        EditorView.contentAttributes.of({ "aria-label": "Differences", tabindex: "0" }),
        read(after).grader ? json() : [], // with the source of Python in it, it is no JSON
        syntaxHighlighting(colors),
        unifiedMergeView({ original: spelled(before), mergeControls: false, collapseUnchanged: { margin: 3, minSize: 2 } }),
        look,
        differences,
      ],
    });
  const view = viewIn(host, begin(compared));
  return { update: (next) => view.setState(begin(next)), destroy: () => view.destroy() };
}

export function mount(host: HTMLElement, shown: Shown, offers: Offers, onchange: (text: string) => void): Editor {
  const attributes = new Compartment();
  let current = shown;

  const named = (one: Shown): Extension =>
    EditorView.contentAttributes.of({ tabindex: "0", "aria-label": one.label, "aria-description": one.description, "aria-invalid": String(one.isInvalid), spellcheck: "false", autocapitalize: "off" });

  const languages: Record<Language, () => Extension> = {
    json: () => [json(), jsonLanguage.data.of({ autocomplete: (context: CompletionContext) => complete(context, offers) })],
    python: () => [python(), indentUnit.of("    "), pythonLanguage.data.of({ autocomplete: (context: CompletionContext) => keysOf(context, offers.fields()) })],
  };

  const begin = (one: Shown): EditorState =>
    EditorState.create({
      doc: one.text,
      extensions: [
        lineNumbers(),
        history(),
        highlightSpecialChars({ specialChars: HIDDEN }),
        indentOnInput(),
        bracketMatching(),
        closeBrackets(),
        autocompletion({ icons: false }),
        typedOverSelection,
        search({ top: true }),
        EditorView.lineWrapping,
        keymap.of([...closeBracketsKeymap, ...completionKeymap, ...searchKeymap, ...historyKeymap, ...defaultKeymap, ...tabs]),
        languages[one.language](),
        attributes.of(named(one)),
        raised,
        syntaxHighlighting(colors),
        look,
        tall,
        EditorView.updateListener.of((update) => {
          const text = update.state.doc.toString();
          if (update.docChanged && text !== current.text) onchange(text);
        }),
      ],
    });

  const view = viewIn(host, begin(shown));

  function update(next: Shown): void {
    const before = current;
    current = next;
    if (before.language !== next.language) {
      view.setState(begin(next)); // another text, with an undo history of its own
      return;
    }
    if (before.label !== next.label || before.description !== next.description || before.isInvalid !== next.isInvalid) {
      view.dispatch({ effects: attributes.reconfigure(named(next)) });
    }
    const { doc } = view.state;
    if (!doc.eq(Text.of(next.text.split(/\r\n?|\n/)))) view.dispatch({ changes: { from: 0, to: doc.length, insert: next.text } });
  }

  /** Mark and select a line, and go there. */
  function show(number: number): void {
    const line = view.state.doc.line(Math.min(number, view.state.doc.lines));
    view.focus();
    view.dispatch({ effects: [markLine.of(line.from), EditorView.scrollIntoView(line.from, { y: "center" })], selection: { anchor: line.from, head: line.to } });
    host.scrollIntoView({ block: "center" });
  }

  return { update, show, destroy: () => view.destroy() };
}
