"""How the report page looks: one style sheet, light and dark, print too."""

STYLE = """
:root {
  --surface: #ffffff; --raised: #f6f8fa; --text: #1f2328; --muted: #59636e; --grid: #e3e6ea; --link: #2a5fc4;
  --s1: #3b6fd4; --s2: #d9790c; --s3: #23906a; --s4: #b5489b; --s5: #7a5cd0; --s6: #c0504d;
  --accepted: #d3e7ff; --accepted2: #bcd9fc; --bonus: #ffe1bd; --warn: #9a5b00; --good: #1a7f4b;
  color-scheme: light dark;
}
@media (prefers-color-scheme: dark) {
  :root {
    --surface: #0f1318; --raised: #171c23; --text: #e6eaef; --muted: #98a3b0; --grid: #2a313a; --link: #82aaff;
    --s1: #7aa5ff; --s2: #f5a44a; --s3: #58c99d; --s4: #e38ad0; --s5: #ab94f7; --s6: #ef8783;
    --accepted: #17395f; --accepted2: #1f4a7a; --bonus: #5a3a12; --warn: #f0b35a; --good: #5bd08f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--surface); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  overflow-wrap: break-word;
}
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .3rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 3rem 0 .25rem; padding-top: 1.25rem; border-top: 1px solid var(--grid); }
h3 { font-size: 1rem; margin: 1.75rem 0 .25rem; }
p { margin: .35rem 0 .8rem; max-width: 46rem; }
.sub, .note { color: var(--muted); }
.note { font-size: .88rem; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; margin: 1rem 0 0; font-size: .9rem; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
.tiles { display: grid; gap: .75rem; margin: 1.5rem 0 0; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); }
.tile { background: var(--raised); border: 1px solid var(--grid); border-radius: 10px; padding: .8rem .95rem; }
.tile b { display: block; font-size: 1.6rem; line-height: 1.2; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: .85rem; }
figure { margin: .9rem 0 0; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 34rem; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .6rem 0 1rem; }
th, td { padding: .38rem .8rem .38rem 0; text-align: left; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { color: var(--muted); font-weight: 550; white-space: nowrap; }
td.n, th.n { text-align: right; }
code, pre { font: .84rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
td code { overflow-wrap: anywhere; }
pre { background: var(--raised); border: 1px solid var(--grid); border-radius: 8px; padding: .8rem 1rem; }
pre { overflow-x: auto; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--link); }
.warn { border-left: 3px solid var(--warn); padding: .1rem 0 .1rem .8rem; margin: .6rem 0; }
.good { color: var(--good); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .3rem 0 .8rem; }
.legend { font-size: .88rem; color: var(--muted); }
.legend i { font-style: normal; border-radius: 3px; padding: 0 .4rem; color: var(--text); }
.talk { background: var(--raised); border: 1px solid var(--grid); border-radius: 10px; }
.talk { padding: .9rem 1.1rem; margin: .9rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.talk .prompt { color: var(--muted); font-size: .86rem; margin: 0 0 .6rem; }
.talk .answer { line-height: 1.75; }
.a, .a2, .b, .f { border-radius: 3px; padding: .08rem 0; }
.a { background: var(--accepted); } .a2 { background: var(--accepted2); } .b { background: var(--bonus); }
.b { box-shadow: inset 1px 0 var(--raised); }
.f { box-shadow: inset 0 -2px var(--muted); }
@media print { nav { display: none; } h2 { break-after: avoid; } figure, .talk { break-inside: avoid; } }
"""
