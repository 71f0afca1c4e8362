"""The bodies clients send, as OpenAI defines them for text models, with vLLM's names for what it adds. Knows no engine.

Whatever stands in a body and not here is refused by its name. Fields that OpenAI has and Octavo cannot honour stand
here with the one value that asks for nothing (`store: false`), since clients send it.

https://platform.openai.com/docs/api-reference/chat/create, .../completions/create
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

from octavo.server.errors import ApiError

MAX_LOGPROBS = 20
_MAX_STOPS = 64
_MAX_IDS = 2**20


def _whole(value: Any) -> Any:
    """1.0 as 1: JSON has one kind of number, and to JSON Schema both are integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _wholes(value: Any) -> Any:
    """The same for all of a list, and at once: calling a function for each of a million ids takes a second."""
    if isinstance(value, list) and len(value) > _MAX_IDS:
        raise ValueError(f"there are {len(value)} token ids, and may be {_MAX_IDS}")
    return [_whole(item) for item in value] if isinstance(value, list) and float in set(map(type, value)) else value


Whole = Annotated[int, BeforeValidator(_whole)]
Text = Annotated[str, Field(max_length=2**24)]
# Of a million wrong items one is enough to tell of.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True), BeforeValidator(_wholes)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
_MAX_BIASES = 4096


def _not_too_many(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _MAX_BIASES:  # before each of a million is complained of
        raise ValueError(f"there are {len(value)}, and may be {_MAX_BIASES}")
    return value


Bias = Annotated[float, Field(ge=-100, le=100)]
BiasedToken = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Biases = Annotated[dict[BiasedToken, Bias], Field(max_length=_MAX_BIASES), BeforeValidator(_not_too_many)]
Json: TypeAlias = dict[str, Any]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _one_stranger(cls, data: Any) -> Any:
        """Of the fields that nobody knows only the first: to complain of a million would take seconds."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        strangers = data.keys() - known
        if len(strangers) < 2:
            return data
        first = next(name for name in data if name in strangers)
        return {name: value for name, value in data.items() if name == first or name in known}


# --- messages ---------------------------------------------------------------------------------------------------------


class TextPart(_Body):
    type: Literal["text"]
    text: Text


Content: TypeAlias = Text | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=4096)]


class FunctionCall(_Body):
    name: str
    arguments: Text  # JSON


class ToolCall(_Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class SystemMessage(_Body):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(_Body):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(_Body):
    """What the server has said itself, as clients hand it back: with fields of no meaning here, all null."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=1024)] | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(_Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]
Messages: TypeAlias = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=65_536)]


# --- tools and formats ------------------------------------------------------------------------------------------------


class Function(_Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    parameters: Json | None = None
    strict: bool | None = None  # arguments follow the schema whether asked or not


class Tool(_Body):
    type: Literal["function"]
    function: Function


class NamedFunction(_Body):
    name: str


class NamedTool(_Body):
    type: Literal["function"]
    function: NamedFunction


class TextFormat(_Body):
    type: Literal["text"]


class JsonObjectFormat(_Body):
    type: Literal["json_object"]


class JsonSchema(_Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None  # answers follow the schema whether asked or not


class JsonSchemaFormat(_Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat: TypeAlias = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


GrammarText = Annotated[str, StringConstraints(min_length=1, max_length=2**16)]  # llguidance's Lark, or GBNF


class StructuredOutputs(_Body):
    """What an answer must be, in one of vLLM's ways."""

    json_: Json | bool | None = Field(None, alias="json")  # a schema
    json_object: Literal[True] | None = None
    regex: GrammarText | None = None  # of the whole answer
    choice: Annotated[list[Stop], Field(fail_fast=True, min_length=1, max_length=1024)] | None = None
    grammar: GrammarText | None = None


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


# --- requests ---------------------------------------------------------------------------------------------------------


class _Asked(_Body):
    """What both kinds of completion take."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Whole, Field(ge=1, le=128)] | None = None
    best_of: Annotated[Whole, Field(ge=1, le=128)] | None = None
    seed: Whole | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=_MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Biases | None = None
    user: str | None = None  # whom the client asks for: nothing here depends on it

    # Beyond OpenAI, as vLLM names them.
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None  # 0 and -1: all
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[Whole, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=4096)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: Annotated[Whole, Field(ge=-(2**31), lt=2**31)] | None = None  # lower ones run first
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    grammar: GrammarText | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check_stream(self) -> None:
        """Raises ApiError for what is for streams where none is asked for."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for streams; set stream.", param="stream_options")


class ChatRequest(_Asked):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[Whole, Field(ge=1, lt=2**31)] | None = None
    max_tokens: Annotated[Whole, Field(ge=1, lt=2**31)] | None = None  # the older name of the same
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    add_generation_prompt: bool | None = None
    chat_template_kwargs: Json | None = None

    store: Literal[False] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: None = None
    functions: None = None
    function_call: None = None


class CompletionRequest(_Asked):
    """The body of /v1/completions."""

    prompt: (
        Text
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=256)]
        | Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=256)]
    )
    max_tokens: Annotated[Whole, Field(ge=0, lt=2**31)] | None = 16  # 0 with echo: only the prompt, and its logprobs
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool = True  # BOS and the like around a text, and their spellings within it
    response_format: ResponseFormat | None = None
    suffix: None = None


class TokenizeText(_Body):
    """The body of /tokenize for a text."""

    model: str | None = None
    prompt: Text
    add_special_tokens: bool = True  # BOS and the like around the text, and their spellings within it
    return_token_strs: bool = False


class TokenizeChat(_Body):
    """The body of /tokenize for a conversation."""

    model: str | None = None
    messages: Messages
    tools: Annotated[list[Tool], Field(fail_fast=True, min_length=1, max_length=128)] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: Json | None = None


def _of_text_or_chat(body: Any) -> str:
    return "Chat" if isinstance(body, TokenizeChat) or (isinstance(body, dict) and "messages" in body) else "Text"


TokenizeRequest: TypeAlias = Annotated[
    Annotated[TokenizeText, Tag("Text")] | Annotated[TokenizeChat, Tag("Chat")], Discriminator(_of_text_or_chat)
]


class DetokenizeRequest(_Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: TokenIds
