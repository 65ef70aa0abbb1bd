"""What guides cost: milliseconds of process time per token of one answer, plain and under each demand.

python scripts/mask_cost.py MODEL [TOKENS]
"""

from __future__ import annotations

import sys
import time

import torch

from cyberslm.generation.constrain import Constraint
from cyberslm.generation.demand import NOTHING, Demand
from cyberslm.generation.grounding import Grounding
from cyberslm.generation.presets import preset
from cyberslm.recipes.use import load

PROMPT = "Host 10.0.0.12 asked evil.com for https://evil.com/a after CVE-2024-3400.\nSummary: "
DEMANDS = {
    "plain": NOTHING,
    "regex": Demand(Constraint.regex(r"(.|\n){1,100000}")),
    "verdict": Demand(preset("verdict")),
    "ground": Demand(ground=Grounding()),
    "verdict + ground": Demand(preset("verdict"), Grounding()),
}


def main() -> None:
    torch.set_num_threads(1)
    engine = load(sys.argv[1])
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 150
    for name, demand in DEMANDS.items():
        engine.generate(PROMPT, demand=demand, temperature=1.0, seed=0, max_new_tokens=tokens)
        made, spent = 0, time.process_time()
        for seed in range(3):
            made += len(
                engine.generate(PROMPT, demand=demand, temperature=1.0, seed=seed, max_new_tokens=tokens)[0].ids
            )
        spent = time.process_time() - spent
        print(f"{name:20}{spent / made * 1e3:8.3f} ms per token, {made} tokens")


if __name__ == "__main__":
    main()
