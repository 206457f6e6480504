"""A process that supervises validations until it is killed.

python supervisor_script.py RUN LOG NAME WRITE_ID
"""

from __future__ import annotations

import sys
from pathlib import Path

from milepost.stores import LocalStore
from milepost.validation.config import ValidationConfig, ValidationTaskConfig
from milepost.validation.supervisor import Validations

config = ValidationConfig(
    "validators:hangs",
    ValidationTaskConfig(fn_kwargs={"log": sys.argv[2], "ignores": True}),
    sys_path=(str(Path(__file__).parent),),
)
validations = Validations(LocalStore(sys.argv[1]), run_id="", config=config)
validations.submit(sys.argv[3], sys.argv[4])
print("submitted", flush=True)
validations.wait(timeout_s=300)
