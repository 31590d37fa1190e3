"""The package as on macOS, on Windows and after a plain install: only the extras do not work, and errors name them."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

WITHOUT_EXTRAS = """
import sys
from importlib.machinery import PathFinder
MISSING = {"triton", "onnx", "onnxscript", "onnxruntime", "sklearn", "matplotlib", "tensorboard", "rich"}
find_spec = PathFinder.find_spec
def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in MISSING else find_spec(name, path, target)
PathFinder.find_spec = find_others
import torch, inline_attention
inline_attention.create_model("inline_deit_study", pretrained=True)  # torch.hub checks only what hubconf.py lists
assert "rich" not in sys.modules
MISSING.remove("rich")  # of the command line, which every installation has
from inline_attention.cli import main
x = torch.randn(1, 9, 8, requires_grad=True)
inline_attention.InLineAttention(8, 2)(x, (3, 3)).sum().backward()
assert x.grad is not None
model = inline_attention.create_model("inline_pvt_tiny", depths=(1, 1, 1, 1), num_classes=2)
model(torch.randn(1, 3, 32, 32)).sum().backward()
assert main(["models"]) == 0
assert main(["env"]) == 0
assert main(["info", "inline_deit_tiny"]) == 0
assert main(["export", "inline_deit_tiny", "--output", sys.argv[1]]) == 2
sys.exit(main(["explore", "--port", "0"]))
"""


def test_without_triton_and_other_extras(tmp_path: Path) -> None:
    """The last command is `explore`. Ctrl-C ends it with status 0, also during a measurement."""
    with subprocess.Popen(
        [sys.executable, "-c", WITHOUT_EXTRAS, str(tmp_path / "m.onnx")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background may not hear it
    ) as process:
        assert process.stdout is not None
        try:
            url = next((line.split()[0] for line in process.stdout if line.startswith("http://")), "")
            host, _, port = url.removeprefix("http://").removesuffix("/").partition(":")
            if port:
                with socket.create_connection((host, int(port)), timeout=20) as connection:
                    connection.sendall(b"POST /api/measure HTTP/1.0\r\nHost: localhost\r\n\r\n")
                    connection.recv(10)
                    process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, error
    assert host == "127.0.0.1"
    assert "pip install 'inline-attention[export]'" in error
    assert "Traceback" not in error
