"""Tools in request bodies: what a client offers, what it asks for, and the calls it sends back. Pure."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from moonpool.cluster.gateway.fields import Body, refusal
from moonpool.cluster.gateway.tool_calls.families import NO_ARGUMENTS, Function

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$", description="letters, digits, _ . -; up to 128")]


class ToolFunction(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments; none: no arguments")
    strict: bool | None = Field(None, description="arguments always follow the schema, as they do where a call is required")


class Tool(Body):
    type: Literal["function"]
    function: ToolFunction

    def for_template(self) -> dict[str, Any]:
        shown = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": shown}


class NamedFunction(Body):
    name: FunctionName


class NamedChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Body):
    model_config = ConfigDict(extra="ignore")  # clients send back what their libraries made of our answer

    name: str
    arguments: dict[str, Any] = Field(description="JSON text of an object")

    @field_validator("arguments", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            found = json.loads(value or "{}", parse_constant=_no_constant)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise refusal("messages", f"tool_calls: arguments {value[:80]!r} are no JSON object; send them as they were given")
        return found


def _no_constant(name: str) -> None:
    raise ValueError(name)


class ToolCall(Body):
    model_config = ConfigDict(extra="ignore")

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolUse(Body):
    """The fields of a chat that are about tools."""

    tools: list[Tool] = Field([], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = Field(
        "auto", description="auto means none where no tools are given"
    )
    parallel_tool_calls: bool = Field(True, description="false: an answer ends with its first call")

    @property
    def callable(self) -> list[Tool]:
        """Tools that the answer may call."""
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, NamedChoice):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return self.tools

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    @property
    def several_calls(self) -> bool:
        """Whether an answer may make more than one."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, NamedChoice)

    @property
    def functions(self) -> list[Function]:
        """With the schemas that calls follow: any object, where the model is free to call and the tool is not strict."""
        free = not self.must_call
        return [
            Function(one.name, {"type": "object"} if free and not one.strict else _arguments_schema(one.parameters))
            for one in (tool.function for tool in self.callable)
        ]

    @property
    def strict(self) -> bool:
        """Whether some tool that may be called is."""
        return any(tool.function.strict for tool in self.callable)

    @model_validator(mode="after")
    def _known_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise refusal("tools", f"{twice!r} is there twice; give every function a name of its own")
        if self.must_call and not self.tools:
            raise refusal("tool_choice", "given without tools; give tools, or leave tool_choice out")
        if isinstance(self.tool_choice, NamedChoice) and not self.callable:
            raise refusal("tool_choice", f"{self.tool_choice.function.name!r} is none of tools; use one of {', '.join(names)}")
        return self


def _arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Of an object, whatever else is said of it."""
    return dict(NO_ARGUMENTS) if parameters is None else {"type": "object", **parameters}
