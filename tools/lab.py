"""
Open the notebooks in JupyterLab, in a headless Chromium, and run them from the top: every cell but the slow ones, through Lab's own commands.

    python tools/lab.py                          all notebooks
    python tools/lab.py tour howto/dp_sgd_run    only these
    python tools/lab.py --pictures DIR           with pictures of each notebook after its run, its code folded away, and the outputs as JSON

Lab and its kernels come from the environment of this Python; they work on a copy of the project, so nothing here changes.
A line for each notebook: cells run, seconds, seconds of the slowest cell. Then what is wrong in it, and exit status 1, if
a cell fails or warns, a dialog stands open, a script of the page or a request fails, or an output or a text is not drawn as it should be.
"""
import argparse
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser, program  # noqa: E402

SETTINGS = {  # all cells are drawn, not only those in sight; nothing is asked of other machines
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": False},
}

RUN = r"""
(async () => {
  const report = window.report = {state: "opening", cells: [], skipped: 0};
  const until = async question => {
    for (;;) {
      const answer = question();
      if (answer) return answer;
      await new Promise(done => setTimeout(done, 50));
    }
  };
  try {
    const app = await until(() => window.jupyterapp);
    await app.restored;
    const panel = window.panel = await until(() => [...app.shell.widgets("main")].find(widget => widget.context?.path === PATH));
    app.shell.activateById(panel.id);
    await panel.context.ready;
    await panel.sessionContext.ready;
    await until(() => panel.sessionContext.session?.kernel?.status === "idle" && app.shell.currentWidget === panel);
    report.state = "running";
    report.title = panel.title.label;
    const notebook = panel.content;
    for (const [place, cell] of notebook.widgets.entries()) {
      const source = cell.model.sharedModel.getSource();
      if (cell.model.type === "code" && /^#\|\s*(slow\b|eval:\s*false)/m.test(source)) { report.skipped += 1; continue; }
      notebook.activeCellIndex = place;
      const start = performance.now();
      await app.commands.execute("notebook:run-cell");
      if (cell.model.type !== "code") continue;
      report.cells.push({place, source, seconds: (performance.now() - start) / 1000, count: cell.model.executionCount, outputs: cell.model.outputs.toJSON()});
    }
    await new Promise(done => setTimeout(done, 500));
    await panel.context.save();
    report.state = "ran";
  } catch (error) {
    report.state = `stopped: ${error}`;
  }
})(); 0
"""

LOOK = r"""
(() => {
  const found = [], short = text => text.trim().replace(/\s+/g, " ").slice(0, 120);
  const all = selector => document.querySelectorAll(selector);
  all(".jp-Dialog, .Toastify__toast").forEach(box => found.push(`a box stands open: ${short(box.textContent)}`));
  for (const [place, cell] of window.panel.content.widgets.entries()) {
    const say = words => found.push(`cell ${place}: ${words}`), node = cell.node;
    node.querySelectorAll("img").forEach(image => image.naturalWidth || say(`a picture is not shown: ${image.getAttribute("src")?.slice(0, 80)}`));
    node.querySelectorAll("mjx-merror, [data-mjx-error]").forEach(formula => say(`a formula is not understood: ${short(formula.textContent)}`));
    if (cell.model.type === "markdown") {
      const body = node.querySelector(".jp-MarkdownOutput")?.cloneNode(true);
      if (!body) { say("the text is not rendered"); continue; }
      body.querySelectorAll("code, pre, mjx-container").forEach(part => part.remove());
      const raw = body.textContent.match(/:::|\$[^$]*\\\w+|\\(frac|begin|ref)\b|@(eq|fig|sec|tbl)-|\]\(|\*\*|^\s*\|.*\|/m);
      if (raw) say(`text left as it was written: ${short(body.textContent.slice(raw.index))}`);
      continue;
    }
    node.querySelectorAll(".jp-OutputArea-output").forEach(output => {
      const kind = output.getAttribute("data-mime-type"), text = output.textContent;
      if (kind === "text/plain" && /<Figure size|<IPython|<pandas| at 0x[0-9a-f]|^\s*\|\s*:?-+/m.test(text)) say(`an output in raw form: ${short(text)}`);
      if (kind === "text/markdown" && /^\s*\|\s*:?-+/m.test(text)) say(`a table in raw form: ${short(text)}`);
      if (output.scrollWidth > output.clientWidth + 2 && kind !== "text/html") say(`${kind} wider than the page by ${output.scrollWidth - output.clientWidth} px`);
    });
  }
  return found;
})()
"""


class Lab(Browser):
    "A JupyterLab on a copy of the project, and a page to see it."

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="databloom-lab-"))
        unwanted = shutil.ignore_patterns(".*", "_docs", "_proc", "_site", "build", "dist", "*.egg-info", "__pycache__")
        self.project = Path(shutil.copytree(ROOT, self.folder / "project", ignore=unwanted, symlinks=True))
        for name, values in SETTINGS.items():
            file = self.folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        self.token, self.log = secrets.token_hex(16), open(self.folder / "lab.log", "w+")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        try:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser", "--ip=127.0.0.1", f"--port={port}",
                 f"--ServerApp.root_dir={self.project}", f"--IdentityProvider.token={self.token}"],
                stdout=self.log, stderr=self.log, cwd=self.project, env=self.surroundings(),
            )
            self.wait(self.answers, 120)
            super().__enter__()
            self.ask("Emulation.setFocusEmulationEnabled", enabled=True)  # Lab's commands go to the notebook that has the focus
            return self
        except BaseException:
            self.stop()
            raise

    def surroundings(self):
        "The variables of an activated environment, with the settings and files of Lab in a folder of their own."
        own = {"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "JUPYTER_CONFIG_DIR": "config",
               "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTER_DATA_DIR": "data", "IPYTHONDIR": "ipython"}
        here = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
        path = os.pathsep.join([str(Path(sys.executable).parent), here.get("PATH", "")])
        return {**here, **{name: str(self.folder / folder) for name, folder in own.items()}, "PATH": path, "VIRTUAL_ENV": sys.prefix}

    def answers(self):
        "Whether Lab serves its page yet."
        if self.server.poll() is not None:
            raise SystemExit(f"JupyterLab ended with {self.server.returncode}:\n{self.said()}")
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{self.url}/api?token={self.token}", timeout=5) as answer:
            return json.load(answer)

    def said(self):
        self.log.flush()
        return Path(self.log.name).read_text()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.stop()

    def stop(self):
        "End Lab, and with it the kernels."
        self.server.terminate()
        try:
            self.server.wait(30)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run_notebook(self, name, seconds):
        "Open a notebook by its address, as a reader would, run it, and tell how it went."
        start = time.monotonic()
        self.events.clear()
        self.size(1200, 3000)
        path = f"nbs/{name}.ipynb"
        self.ask("Page.navigate", url=f"{self.url}/lab/tree/{path}?reset&token={self.token}")
        self.wait(lambda: self.run("document.readyState == 'complete' && location.pathname.startsWith('/lab')"), 60)
        self.run(RUN.replace("PATH", json.dumps(path)))
        report, faults = {}, []
        try:
            self.wait(lambda: time.sleep(0.2) or self.run("window.report.state").startswith(("ran", "stopped")), seconds)
        except TimeoutError:
            faults.append(f"not done within {seconds} s")
        report = self.run("window.report")
        if report["state"] != "ran":
            faults.append(f"state at the end: {report['state']}")
        else:
            faults += [*self.run(LOOK)]
        for cell in report["cells"]:
            faults += [f"cell {cell['place']}: {fault}" for fault in complaints(cell)]
        faults += self.complaints()
        return {"name": name, "seconds": time.monotonic() - start, "faults": faults, **report}

    def pictures(self, name, folder):
        "Pictures of the notebook's texts and outputs from the top to the end, one for each screen, without the file browser."
        box = 'document.querySelector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer")'
        self.run('window.jupyterapp.shell.collapseLeft(); window.jupyterapp.commands.execute("notebook:hide-all-cell-code").then(() => 0)')
        end = self.run(f'document.querySelector(".jp-Notebook-footer").getBoundingClientRect().top + {box}.scrollTop - {box}.getBoundingClientRect().top')
        seen = self.run(f"{box}.clientHeight")
        for number, top in enumerate(range(0, int(end), seen)):
            self.run(f"{box}.scrollTop = {top}; new Promise(done => setTimeout(done, 300))")
            self.picture(Path(folder, f"{name.replace('/', '_')}_{number}.png"), whole=False)

    def close_notebook(self):
        "Shut the kernel down, so that one runs at a time."
        self.run("window.panel && window.panel.sessionContext.shutdown().then(() => 0)")


def complaints(cell):
    "What a cell's outputs complain about."
    if cell["count"] is None and cell["source"].strip():
        yield "did not run"
    for output in cell["outputs"]:
        if output["output_type"] == "error":
            yield f"{output['ename']}: {output['evalue']}"
        elif output.get("name") == "stderr":
            yield f"stderr: {''.join(output['text']).strip()[:300]}"


def names():
    "The notebooks of the book, without folder and ending."
    paths = sorted(path for path in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
    return [path.relative_to(ROOT / "nbs").with_suffix("").as_posix() for path in paths]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks below nbs/, without .ipynb (all, if none is named)")
    parser.add_argument("--pictures", metavar="DIR", type=Path, help="keep pictures and a report of each run there")
    parser.add_argument("--seconds", type=float, default=600, help="the longest that one notebook may take (600)")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names()):
        parser.error(f"no such notebook: {', '.join(sorted(unknown))}")
    if program() is None:
        sys.exit("no Chromium on this machine: install one (Debian: apt-get install chromium)")
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    wrong = 0
    with Lab() as lab:
        for name in options.names or names():
            report = lab.run_notebook(name, options.seconds)
            slowest = max((cell["seconds"] for cell in report["cells"]), default=0)
            busy = sum(cell["seconds"] for cell in report["cells"])
            print(f"{name}: {len(report['cells'])} cells run, {report['skipped']} slow ones left out, {busy:.1f} s (slowest cell {slowest:.1f} s)", flush=True)
            for fault in report["faults"]:
                print(f"  {fault}", flush=True)
            wrong += len(report["faults"])
            if options.pictures:
                Path(options.pictures, f"{name.replace('/', '_')}.json").write_text(json.dumps(report))
                if report["state"] == "ran":
                    lab.pictures(name, options.pictures)
            lab.close_notebook()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
