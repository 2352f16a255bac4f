"""The classes that the user lists as public by ``data.classes``, and what a reader says where nobody lists them."""

from typing import Final

from fl_sim.data.naming import OwnName
from fl_sim.errors import UserError

CLASSES_READ_OFF: Final = "which classes there are, and so the model's outputs (data.classes=A+B lists public ones)"
SIZE_READ_OFF: Final = "the size of the images (data.size=WIDTHxHEIGHT sets it)"
COLOUR_READ_OFF: Final = "whether any image has colour, and so the model's inputs"
_MOST: Final = 1000


def listed_classes(own: OwnName) -> tuple[str, ...]:
    """Return the classes in the order of ``data.classes``, none where it is not set; ``10`` stands for 0 to 9.

    Raises UserError for fewer than two classes, and for one that is listed twice.
    """
    given = own.options.get("classes", ())
    if len(given) == 1 and given[0].isascii() and given[0].isdigit() and 2 <= int(given[0][:5]) <= _MOST:
        return tuple(map(str, range(int(given[0]))))
    if given and ("" in given or len(set(given)) < max(2, len(given))):
        raise UserError(
            f"data.classes = {'+'.join(given)!r}: it lists two classes or more, each once, with + between "
            f"(data.classes=ill+well), or is their number, at most {_MOST}, where they are 0, 1, 2, ..."
        )
    return given


def read_off_classes(listed: object) -> tuple[str, ...]:
    """Return that the classes were read off the records, unless the user has ``listed`` them."""
    return () if listed else (CLASSES_READ_OFF,)


def unlisted(where: str, cure: str = "") -> UserError:
    """Return the refusal of records of another class, which it does not name: that may be the secret of a record."""
    return UserError(
        f"{where}: there are records of a class that data.classes does not list; list it, leave data.classes out{cure}"
    )
