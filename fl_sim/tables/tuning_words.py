"""What is said of a search: in the table's caption, in table.json, and in tuning.csv."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fl_sim.tables.tuning_space import Rung, Tune
from fl_sim.tables.tuning_trials import Choice, Tried
from fl_sim.tables.words import data_label, text


def csv_text(tried: Iterable[Tried]) -> str:
    """Return one line for each trial on each of its rungs, accuracies in [0, 1]."""
    lines = io.StringIO()
    table = [_line(one) for one in tried]
    writer = csv.DictWriter(lines, list(table[0]) if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return lines.getvalue()


def _line(one: Tried) -> dict[str, Any]:
    row, column = one.trial.search.place
    return {
        "row": row, "column": column, "trial": one.trial.number, "rung": one.rung, "rounds": one.rounds,
        "trained": one.trained, "values": json.dumps(one.trial.values), "accuracy": one.accuracy, "status": one.status,
        "seconds": one.seconds, "dir": one.name, "error": one.error,
    }  # fmt: skip


def as_json(choices: Iterable[Choice], tune: Tune) -> list[dict[str, Any]]:
    """Return what ``table.json`` says of each search; accuracies in percent, as all of it has them."""
    return [
        {
            "row": choice.search.cell.row, "column": choice.search.cell.column, "seed": choice.search.cell.seed,
            "values": dict(choice.best.trial.values),
            "accuracy": 100 * (choice.best.accuracy or 0.0), "at_end": choice.at_end,
            "judged_on": f"test records of {tune.data}" if tune.data else "validation",
            "trials": choice.search.rungs[0].trials,
            "rungs": [[rung.trials, rung.rounds] for rung in choice.search.rungs],
            **_spent(choice.tried),
        }
        for choice in choices
    ]  # fmt: skip


def caption(choices: Sequence[Choice], tune: Tune) -> tuple[str, ...]:
    """Return what a reader must know of the searches, and what each came to."""
    if not choices:
        return ("The search for the settings of the methods is not done, so none of the table's own runs has begun.",)
    spent = _spent(one for choice in choices for one in choice.tried)
    plans = "; ".join(dict.fromkeys(_rungs(choice.search.rungs) for choice in choices))
    judged = (
        f"on {data_label(tune.data)}, public records in place of the table's own, with the same splits and clients, "
        "judged by its test records"
        if tune.data
        else f"judged on {_judges(tune.validation)}; no trial looks at the test records"
    )
    drawn = "at random" if tune.search == "random" else "by Optuna's TPE"
    seeds = ", ".join(dict.fromkeys(str(choice.search.cell.seed) for choice in choices))
    diverged = f", of which {spent['diverged']} diverged" if spent["diverged"] else ""
    held_out = any(choice.search.cell.experiment.evaluate.validation not in {0.0, "given"} for choice in choices)
    first = (
        f"Tuned: for every method in every column {plans}; values drawn {drawn} (tune.seed {tune.seed}), the same ones "
        f"of shared settings for all methods; {judged}. Trials have the first of the table's seeds ({seeds}). All "
        f"searches together took {spent['runs']} runs{diverged}, {spent['rounds']:,} rounds and "
        f"{spent['seconds']:,.0f} s; tuning.csv lists them. The runs of the table "
        f"{'' if held_out else 'train on all training records and '}look at the test records once, at the end."
    )
    rows = [_row(row, [one for one in choices if one.search.cell.row == row]) for row in _rows(choices)]
    ends = [f"{choice.search.words}: {', '.join(choice.at_end)}" for choice in choices if choice.at_end]
    wider = f"Chosen at an end of what could be drawn, so a wider space may do better: {'; '.join(ends)}."
    return first, *rows, *([wider] if ends else [])


def _rows(choices: Iterable[Choice]) -> list[str]:
    return list(dict.fromkeys(choice.search.cell.row for choice in choices))


def _row(row: str, choices: Iterable[Choice]) -> str:
    found = (f"{choice.search.cell.column} {_values(choice.best.trial.values)}" for choice in choices)
    return f"{row}, chosen: {'; '.join(found)}."


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={text(value)}" for key, value in values.items())


def _judges(validation: float | str) -> str:
    if validation == "given":
        return "the validation records that the data come with"
    return f"{100 * float(validation):g} % of every client's training records, which trials do not train on"


def _rungs(rungs: Sequence[Rung]) -> str:
    first, *others = rungs
    words = f"{first.trials} trials of {first.rounds} rounds"
    return words + "".join(f", the best {rung.trials} of them {rung.rounds} rounds" for rung in others)


def _spent(tried: Iterable[Tried]) -> dict[str, Any]:
    """Return what the runs of trials cost: the same settings are run once, whoever asks for them."""
    runs = {(one.name, one.rung): one for one in tried}.values()
    return {
        "runs": len({one.name for one in runs}),
        "diverged": sum(one.status == "diverged" for one in runs),
        "rounds": sum(one.trained for one in runs),
        "seconds": sum(one.seconds for one in runs),
    }
