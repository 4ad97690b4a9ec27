"""What agents are asked here, and what they call and answer: the script of tests/serving/helpers/scripted_models.py."""

from typing import Literal

from pydantic import BaseModel

QUESTION = "Where does it rain, in Paris or in Rome?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    rains: bool


class Tool:
    """The tool, and what it was asked in a test."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    def get_weather(self, city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city.

        Args:
            city: The name of the city.
        """
        self.cities.append(city)
        return f"rain in {city}"

    def check(self, answer: object) -> None:
        """Asserts that the loop was what the script says. answer: the typed one, or its JSON."""
        assert self.cities == ["Paris", "Rome"]
        check_answer(answer)


def check_answer(answer: object) -> None:
    weather = Weather.model_validate_json(answer) if isinstance(answer, str) else Weather.model_validate(answer)
    assert weather == Weather(city="Rome", rains=True)
