"""The acceptance laws: Proposal + target probabilities -> accepted path + next token."""

from inference.laws import block, coupled, greedy, rejection, typical
from inference.laws.verdict import Law, Policy, Verdict

LAWS: dict[str, Law] = {
    "greedy": Law(greedy.judge, greedy.judge_plain, exact=True, source="none"),
    "rejection": Law(rejection.judge, rejection.judge_plain, exact=True, source="keyed"),
    "block": Law(block.judge, block.judge_plain, exact=True, source="keyed"),
    "coupled": Law(coupled.judge, coupled.judge_plain, exact=True, source="position"),
    "typical": Law(typical.judge, typical.judge_plain, exact=False, source="none"),
}

__all__ = ["LAWS", "Law", "Policy", "Verdict"]
