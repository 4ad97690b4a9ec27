"""Functions that the models of the tests may call."""

from pagedattn_serve.output_parsing.tool_format import Function

WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"$ref": "#/$defs/city"},
            "days": {"type": "integer"},
            "kind": {"enum": ["rain", "wind"]},
            "is_near": {"type": "boolean"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"type": "string"}},
    },
)
TIME = Function("get_time")
FUNCTIONS = (WEATHER, TIME)
