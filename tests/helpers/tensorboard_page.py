"""TensorBoard as a process and its "Parameter servers" tab in a real browser, for tests."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tfps.types import Argument, Json

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 90.0
# TensorBoard runs as where TensorFlow is not installed: that saves the seconds in which it would import it.
_START = "import sys; sys.modules['tensorboard.compat.notf'] = sys; from tensorboard.main import run_main; run_main()"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


def missing() -> str:
    """Why there can be no browser, or nothing."""
    if not any(map(shutil.which, _BROWSERS)):
        return f"needs one of {', '.join(_BROWSERS)}"
    return "" if shutil.which("chromedriver") else "needs chromedriver (Debian: chromium-driver)"


@contextlib.contextmanager
def tensorboard(log_dir: Path) -> Iterator[str]:
    """Serves a log directory from this source tree, on a free port; gives the address.

    Raises:
        RuntimeError: it ended at once; the message has its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The entry point of this tree's setup.py, whatever is installed.
        describe = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder]
        subprocess.run(describe, cwd=ROOT, check=True, capture_output=True, timeout=DEADLINE_S)
        environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "TF_CPP_MIN_LOG_LEVEL": "1"}
        command = ["-c", _START, "--logdir", str(log_dir), "--host", "127.0.0.1", "--port", "0"]
        process = subprocess.Popen(
            [sys.executable, *command, "--load_fast", "false"],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said: list[str] = []
        there = threading.Event()

        def listen() -> None:
            for line in process.stdout or ():
                said.append(line)
                if "http://" in line:
                    there.set()
            there.set()

        listener = threading.Thread(target=listen, name="tensorboard-output")
        listener.start()
        try:
            there.wait(DEADLINE_S)
            address = re.search(r"http://127\.0\.0\.1:\d+/", "".join(said))
            if address is None:
                raise RuntimeError(f"TensorBoard did not start: {''.join(said)}")
            yield address[0]
        finally:
            process.terminate()
            process.wait(DEADLINE_S)
            listener.join(DEADLINE_S)


class Page:
    """The tab in a browser of its own; `driver` is selenium's."""

    def __init__(self, width: int = 1500, height: int = 1000) -> None:
        options = Options()
        options.binary_location = next(filter(None, map(shutil.which, _BROWSERS)))
        for argument in (*_ARGUMENTS, f"--window-size={width},{height}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.driver.set_script_timeout(DEADLINE_S)

    def close(self) -> None:
        """Ends the browser."""
        self.driver.quit()

    def open(self, address: str) -> None:
        """Goes to the tab and waits until it shows all, or why not."""
        self.driver.get("about:blank")
        self.driver.get(f"{address}#tfps")
        frame = WebDriverWait(self.driver, DEADLINE_S).until(lambda d: d.find_element(By.CSS_SELECTOR, "iframe"))
        self.driver.switch_to.frame(frame)
        self.settle()

    def settle(self) -> None:
        """Waits until everything is loaded and drawn."""
        WebDriverWait(self.driver, DEADLINE_S, 0.05).until(
            lambda _: self("return window.tfps && ['ready', 'failed'].includes(tfps.state)")
        )
        self.frame()

    def frame(self) -> None:
        """Waits for two frames: then what was asked for before is drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        )

    def __call__(self, script: str, *arguments: Argument) -> Json:
        """Runs JavaScript in the tab. `tfps` is its page, `pane`, `view` and `trace` the first pane and its parts."""
        names = "const [pane] = window.tfps?.panes ?? []; const view = pane?.timeline, trace = pane?.trace;"
        return self.driver.execute_script(f"{names} {script}", *arguments)

    def errors(self) -> list[str]:
        """What the console said since the last call that is no mere information."""
        log: list[dict[str, Json]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]
