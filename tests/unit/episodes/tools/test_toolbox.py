"""Each kind of tool through real worker processes, from begin to end of an episode."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.episodes.tools.rows import called, names, row, toolbox, write
from verl_like.plugins.agents.tools.tool_call import ToolError
from verl_like.plugins.agents.tools.toolbox import Toolbox

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]

NATIVE = """
    from typing import Any, Optional
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
    from verl.utils.rollout_trace import rollout_trace_op

    class Older(BaseTool):
        '''As of verl 0.5: create gives the id, execute a tuple with a str.'''
        def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
            super().__init__(config, tool_schema)
            self.notes, self.released = {}, []

        async def create(self, instance_id: Optional[str] = None, start: str = "", **kwargs) -> str:
            self.notes["own-" + instance_id] = [start]
            return "own-" + instance_id

        @rollout_trace_op
        async def execute(self, instance_id: str, parameters: dict[str, Any], end: str = "", **kwargs):
            self.notes[instance_id].append(parameters["word"] + end)
            return " ".join(self.notes[instance_id]) + self.config["mark"], 0.5, {"words": len(self.notes[instance_id])}

        async def calc_reward(self, instance_id: str, weight: float = 1.0, **kwargs) -> float:
            return weight * len(self.notes[instance_id])

        async def release(self, instance_id: str, **kwargs) -> None:
            del self.notes[instance_id]

    class Newer(BaseTool):
        '''As of verl 0.9: create gives a pair, create_kwargs is one argument, the schema is the class's own.'''
        def get_openai_tool_schema(self):
            return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {
                "name": "newer", "description": "Newer.", "parameters": {"type": "object", "properties": {
                    "tags": {"type": "array", "items": {"type": "string"}}}}}})

        async def create(self, instance_id=None, create_kwargs=None):
            self.given = create_kwargs
            return instance_id, ToolResponse(text="created"), "more"

        async def execute(self, instance_id, parameters, agent_data):
            agent_data.extra_fields["calls"] = agent_data.extra_fields.get("calls", 0) + 1
            text = f"{self.given} {agent_data.extra_fields['calls']} {agent_data.messages[0]['role']}"
            return ToolResponse(text=text, image=[b"a file"]), None, None
"""
CONFIG = """
    tools:
      - class_name: {file}:Older
        config: {{type: native, mark: "!"}}
        tool_schema:
          type: function
          function:
            name: older
            description: Older.
            parameters:
              type: object
              properties:
                word: {{description: A word., type: string}}
              required: [word]
      - class_name: my_tools.Newer
        config: {{type: native}}
"""
FUNCTIONS = """
    import asyncio
    from typing import Literal, Optional
    from verl.tools.function_tool import function_tool
    from verl.tools.schemas import ToolResponse

    @function_tool
    async def add(a: int, b: int = 1) -> dict:
        '''Adds two numbers.

        Args:
            a: The first
                of them.
            b: The second.
        '''
        await asyncio.sleep(0)
        return {"sum": a + b, "é": None}

    @function_tool("shout")
    def loud(word: str, sign: Literal["!", "?"] = "!", times: Optional[int] = None):
        '''Shouts.

        Args:
            word: What.
            sign: How.
            times: How often.
        '''
        return ToolResponse(text=word.upper() + sign * (times or 1)), 0.25, {"loud": True, "note": "n", "none": None}
"""
ENVIRONMENT = """
    class Guessing:
        made = 0

        def __init__(self):
            type(self).made += 1

        def reset(self, ground_truth, limit=3, **row):
            self.truth, self.left, self.won = int(ground_truth), limit, False
            return f"{row['data_source']} {row['prompt'][0]['role']}: guess the number in {self.left} tries"

        def guess(self, number: int) -> str:
            '''Guesses the number.

            Args:
                number: Your guess.
            '''
            self.left -= 1
            self.won = number == self.truth
            return "right" if self.won else f"wrong, {self.left} left"

        async def objects(self):
            '''How many objects of this class there are.'''
            return self.made

        def get_reward(self):
            return 1.0 if self.won else 0.0

        def _hidden(self):
            '''No tool.'''
"""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toolbox]:
    """All kinds in one toolbox."""
    folder = tmp_path_factory.mktemp("all_kinds")
    file = write(folder, "my_tools.py", NATIVE)
    with toolbox(
        tool_config_path=write(folder, "tools.yaml", CONFIG.format(file=file)),
        function_tool_path=write(folder, "functions.py", FUNCTIONS),
        environment_path=write(folder, "game.py", ENVIRONMENT) + ":Guessing",
    ) as made:
        yield made


def test_schemas_of_all_kinds_are_known_in_the_trainer_without_its_importing_anything(box: Toolbox) -> None:
    assert names(box.schemas) == ["older", "newer", "add", "shout", "guess", "objects"]
    functions = {schema["function"]["name"]: schema["function"] for schema in box.schemas}
    assert list(functions["older"]["parameters"]["properties"]["word"]) == ["type", "description"]  # verl's order
    assert functions["newer"]["parameters"]["properties"]["tags"] == {"type": "array", "items": {"type": "string"}}
    assert functions["add"] == {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first of them."},
                "b": {"type": "integer", "description": "The second."},
            },
            "required": ["a"],
        },
    }
    assert functions["objects"]["parameters"] == {"type": "object", "properties": {}}
    assert not {"my_tools", "functions", "game", "verl.tools.base_tool"} & set(sys.modules)


def test_arguments_that_no_tool_is_given_are_told_once(box: Toolbox, caplog: pytest.LogCaptureFixture) -> None:
    for session in ("first", "second"):
        box.begin(session, row(tools_kwargs={"addd": {}, "add": {"create_kwarg": {"x": 1}, "execute_kwargs": {}}}))
        box.end(session).result(20)
    assert (
        caplog.text.count("tools_kwargs names 'addd'") == caplog.text.count("tools_kwargs.add has 'create_kwarg'") == 1
    )


def test_a_row_selects_tools(box: Toolbox, caplog: pytest.LogCaptureFixture) -> None:
    assert box.schemas_for(row()) == box.schemas
    assert names(box.schemas_for(row(tool_selection=["shout", "add", "shout", "nothing"]))) == ["shout", "add"]
    assert box.schemas_for(row(tool_selection=["nothing"])) is None
    assert caplog.text.count("'nothing'") == 1
    box.begin("select", row(tool_selection=["add"])).result(20)
    refused = called(box, "select", "shout", word="a")
    assert refused.kind == "unknown_tool" and refused.text == "Unknown function 'shout'. Available tools: ['add']"
    assert called(box, "select", "add", a=1).text == '{"sum": 2, "é": null}'
    assert box.end("select").result(20).reward == 0.0  # the environment's: it begins with every episode


def test_classes_of_both_generations_keep_the_state_of_an_episode(box: Toolbox) -> None:
    settings = {
        "create_kwargs": {"start": "It:"},
        "execute_kwargs": {"end": ","},
        "calc_reward_kwargs": {"weight": 2.0},
    }
    chosen = row(
        tools_kwargs={"older": settings, "newer": {"create_kwargs": {"x": 1}}}, tool_selection=["older", "newer"]
    )
    assert box.begin("one", chosen).result(20).text == "created\ntest user: guess the number in 3 tries"
    box.begin("two", row(tool_selection=["older"])).result(20)
    assert called(box, "one", "older", word="a").text == "It: a,!"
    assert called(box, "two", "older", word="b").text == " b!"
    again = called(box, "one", "older", word="c")
    assert (again.text, again.reward, again.metrics) == ("It: a, c,!", 0.5, {"words": 3.0})
    assert called(box, "one", "newer").text == "{'x': 1} 1 user"
    assert called(box, "one", "newer", tags=["t"]).text == "{'x': 1} 2 user"
    assert called(box, "one", "newer").media == [("image", "data:image/png;base64,YSBmaWxl")]
    end = box.end("one").result(20)
    assert end.kind is None and end.metrics == {"tool_reward/older": 6.0, "tool_reward/Guessing": 0.0}
    assert end.reward == 0.0  # the environment's: it alone scores the episode. `newer` has no calc_reward of its own
    late = called(box, "one", "older", word="a")
    assert late.kind == "exception" and late.text.endswith("the episode one has not begun, or has ended")
    assert box.end("two").result(20).metrics == {"tool_reward/older": 2.0, "tool_reward/Guessing": 0.0}


def test_functions_need_no_episode(box: Toolbox) -> None:
    assert box.call("nobody", "add", '{"a": 40, "b": 2}').result(20).text == '{"sum": 42, "é": null}'
    loud = called(box, "nobody", "shout", word="hey", times=2)
    assert (loud.text, loud.reward) == ("HEY!!", 0.25)
    assert loud.metrics == {"loud": 1.0, "note": "n", "none": None}


def test_an_environment_from_reset_to_reward(box: Toolbox) -> None:
    first = box.begin("lost", row(5, limit=2)).result(20)
    assert first.text == "created\ntest user: guess the number in 2 tries"  # `newer` is created as well
    assert box.begin("won", row(7)).result(20).text.endswith("in 3 tries")
    assert called(box, "lost", "guess", number=7).text == "wrong, 1 left"
    assert called(box, "won", "guess", number=7).text == "right"
    objects = int(called(box, "won", "objects").text)
    assert [box.end(name).result(20).metrics["tool_reward/Guessing"] for name in ("lost", "won")] == [0.0, 1.0]
    box.begin("later", row(7)).result(20)
    assert int(called(box, "later", "objects").text) == objects  # used again
    assert box.end("later").result(20).reward is not None


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "said"),
    [
        ("nothing", {}, "unknown_tool", "Unknown function 'nothing'. Available tools: ['older', "),
        ("reset", {}, "unknown_tool", "Unknown function 'reset'"),
        ("_hidden", {}, "unknown_tool", "Unknown function '_hidden'"),
        ("n" * 5000, {}, "unknown_tool", "Unknown function 'nnn"),
        ("add", {}, "bad_arguments", "Invalid arguments for 'add': missing a. It takes: a, b"),
        ("add", {"a": 1, "c": 2}, "bad_arguments", "Invalid arguments for 'add': unknown c. It takes: a, b"),
        ("add", '{"a": 1', "bad_arguments", "Invalid JSON in arguments for 'add': "),
        ("add", "[" * 100_000, "bad_arguments", "Invalid JSON in arguments for 'add': "),
        ("add", "[1]", "bad_arguments", "Invalid arguments for 'add': they must be a JSON object"),
        ("add", {"a": "x"}, "exception", "Error executing tool 'add': "),
    ],
)
def test_what_the_model_gets_wrong_is_told_to_it(
    box: Toolbox, name: str, arguments: dict[str, object] | str, kind: str, said: str
) -> None:
    outcome = box.call("nobody", name, arguments).result(20)
    assert outcome.kind == kind and outcome.text.startswith(said) and len(outcome.text) < 600


def test_a_row_that_cannot_travel_is_an_outcome(box: Toolbox) -> None:
    assert box.begin("odd", row(odd=lambda: 0)).result(20).kind == "exception"
    assert box.end("odd").result(20).kind is None


UNUSABLE = [
    ({}, "no tools: set"),
    ({"tool_config_path": "tools: [{class_name: verl.tools.base_tool.BaseTool}]"}, "has no schema"),
    ({"function_tool_path": "missing.py"}, "multi_turn.function_tool_path=missing.py: there is no such file"),
    ({"function_tool_path": "import os"}, "no function of the file is decorated"),
    ({"function_tool_path": "raise SystemExit(3)"}, "could not be imported"),
    (
        {"function_tool_path": "from verl.tools.function_tool import *\n@function_tool\ndef f(a): 'Doc.'"},
        "tool 'f': argument 'a' has no type hint",
    ),
    ({"environment_path": "class E:\n def act(self): 'Acts.'"}, "E has no method reset"),
    ({"environment_path": "class E:\n def reset(self): pass\n def act(self): pass"}, "tool 'act' has no docstring"),
    ({"environment_path": "class E:\n def __init__(self): raise SystemExit(0)"}, "SystemExit"),
    ({"tool_config_path": "tools: []"}, "must hold a list `tools`"),
    ({"tool_config_path": "tools: [{class_name: calculator}, {class_name: calculator}]"}, "rename one"),
    ({"tool_config_path": "tools: [{class_name: calculator, config: {type: remote}}]"}, "config.type='remote'"),
    ({"tool_config_path": "tools: [{class_name: calculator, config: 3}]"}, "config must be a mapping"),
    ({"tool_config_path": "tools: [{class_name: no.such.Tool}]"}, "tools[0].class_name"),
    ({"tool_config_path": "tools: [{class_name: Tool}]"}, "tools[0].class_name"),
    ({"tool_config_path": "tools: ["}, "tool_config_path="),
]
SAY_WHY = """
import json, sys
from verl_like.plugins.agents.tools.loading import load_tools
from verl_like.plugins.agents.tools.tool_call import ToolSpec
for settings in json.loads(sys.argv[1]):
    try:
        load_tools(ToolSpec(**settings))
        print(json.dumps(""))
    except ValueError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def reasons(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What is said of each of UNUSABLE, in one process for all."""
    folder, specs = tmp_path_factory.mktemp("unusable"), []
    endings = {"function_tool_path": ".py", "environment_path": ".py", "tool_config_path": ".yaml"}
    for number, (settings, _) in enumerate(UNUSABLE):
        spec = {key: write(folder, f"x{number}{endings[key]}", text) for key, text in settings.items()}
        if "environment_path" in spec:
            spec["environment_path"] += ":E"
        specs.append(settings if "missing.py" in settings.values() else spec)
    line = [sys.executable, "-c", SAY_WHY, json.dumps(specs)]
    run = subprocess.run(line, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [json.loads(text) for text in run.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(UNUSABLE)), ids=[why for _, why in UNUSABLE])
def test_tools_that_cannot_be_used_say_why(reasons: list[str], number: int) -> None:
    assert UNUSABLE[number][1] in reasons[number]


def test_it_is_an_error_at_the_start(tmp_path: Path) -> None:
    path = write(tmp_path, "e.py", "raise SystemExit(3)")
    with (
        pytest.raises(ToolError, match=r"multi_turn.environment_path=.*could not be imported"),
        toolbox(environment_path=f"{path}:E"),
    ):
        pass
    with pytest.raises(ToolError, match="truncate_side"), toolbox(environment_path="e.py:E", truncate_side="up"):
        pass


def test_an_installed_verl_comes_before_its_stand_ins(tmp_path: Path) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("real = True")
    script = """
import sys
from verl_like.user_code import _STAND_INS
sys.path[:] = [_STAND_INS, *sys.path, sys.argv[1]]
import verl
print(verl.real)
"""
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert run.stdout.strip() == "True", run.stderr
