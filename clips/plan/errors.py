"""Why a recipe is refused."""

from protocol.outcomes import RequestError


class RecipeError(RequestError):
    """A recipe that cannot be rendered; ``field``: dotted path to the fault, "" for all."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"recipe.{field}: {message}" if field else f"recipe: {message}")
        self.field = field
