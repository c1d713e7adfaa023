"""The offline API, in vLLM's words.

llm = LLM("smollm2-135m", max_num_seqs=16)
for output in llm.generate(["The capital of France is", "1, 2, 3,"], SamplingParams(temperature=0)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Self

from tqdm.auto import tqdm

from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine, Prompt
from mini_engine.errors import ConfigError, RequestError
from mini_engine.output_processor import RequestOutput
from mini_engine.sequence import SamplingParams

Message = Mapping[str, Any]


@dataclass(frozen=True)
class TextDelta:
    """What one step added to output `index` of a streamed request; `finish_reason` comes with the last one."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


class TextStream:
    """An iterator over what each step adds to a request. Closing it, or dropping it half read, aborts the request."""

    def __init__(self, engine: LLMEngine, record: RequestOutput):
        self.record = record
        self._engine = engine
        self._deltas = self._read()

    def __iter__(self) -> Iterator[TextDelta]:
        return self

    def __next__(self) -> TextDelta:
        return next(self._deltas)

    def close(self) -> None:
        self._engine.abort(self.record.request_id)

    def __del__(self) -> None:
        self.close()

    def _read(self) -> Iterator[TextDelta]:
        sent = [(0, 0) for _ in self.record.outputs]
        while True:
            fresh = False
            for i, output in enumerate(self.record.outputs):
                num_chars, num_tokens = sent[i]
                if len(output.token_ids) > num_tokens:
                    fresh = True
                    sent[i] = len(output.text), len(output.token_ids)
                    yield TextDelta(i, output.text[num_chars:], output.token_ids[num_tokens:], output.finish_reason)
            if fresh:
                continue  # while the reader was busy, another stream's steps may have added more
            if self.record.finished:
                return
            self._engine.step()


class LLM:
    """A model ready to answer. Takes a model and keyword arguments of EngineConfig, or an EngineConfig.

    With several ranks it has processes of its own. They end with `close`, or when a `with` block is left; failing that,
    with the last reference to this object.
    """

    def __init__(self, model: str | EngineConfig | None = None, config: EngineConfig | None = None, **options: Any):
        if isinstance(model, EngineConfig):
            model, config = None, model
        unknown = options.keys() - {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown:
            known = ", ".join(field.name for field in dataclasses.fields(EngineConfig))
            raise ConfigError(f"unknown engine option {', '.join(sorted(unknown))}; known are {known}")
        if model is not None:
            options["model"] = str(model)
        self.engine = LLMEngine(dataclasses.replace(config or EngineConfig(), **options))
        self._next_id = 0

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        priority: Seq[int] | None = None,
        cache_salt: str | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts, in their order. One SamplingParams serves all, or a list gives one each.

        Raises RequestError, naming the index, before anything runs, if one of the prompts could never be served.
        """
        prompts = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        params = _one_each(sampling_params, prompts)
        priorities = list(priority) if priority is not None else [0] * len(prompts)
        if len(priorities) != len(prompts):
            raise RequestError(f"{len(priorities)} priorities for {len(prompts)} prompts")
        requests = []
        for i, (prompt, param, rank) in enumerate(zip(prompts, params, priorities, strict=True)):
            try:
                requests.append(self.engine.prepare(self._new_id(), prompt, param, rank, cache_salt))
            except RequestError as error:
                raise type(error)(f"prompt {i}: {error}") from None
        records = [self.engine.submit(request) for request in requests]
        try:
            with tqdm(total=len(records), desc="requests", disable=not use_tqdm) as bar:
                while not all(record.finished for record in records):
                    bar.update(sum(record.finished for record in self.engine.step()))
        finally:
            for record in records:
                self.engine.abort(record.request_id)
            if not self.engine.requests:
                self.engine.step()  # lets a step in flight land, where an abort left one
        return records

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's own chat template.

        A message is {"role": "system" | "user" | "assistant", "content": text}. Options are those of `generate`.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_prompt(each) for each in conversations], sampling_params, **options)  # type: ignore[arg-type]

    def chat_prompt(self, messages: Seq[Message]) -> Prompt:
        """A conversation as the model expects it: the rendered text and its token ids."""
        tokenizer = self.engine.tokenizer
        text = tokenizer.apply_chat_template(messages)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> TextStream:
        """Answer one prompt piece by piece. Raises RequestError at the call. Several streams may be read in turn."""
        return TextStream(self.engine, self.engine.add_request(self._new_id(), prompt, sampling_params))

    def close(self) -> None:
        """Give back what the engine holds besides memory: the processes of its ranks. May be called again."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _new_id(self) -> str:
        self._next_id += 1
        return f"request-{self._next_id}"


def _one_each(params: SamplingParams | Seq[SamplingParams] | None, prompts: Seq[Prompt]) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise RequestError(f"{len(params)} sampling parameters for {len(prompts)} prompts: give one, or one each")
    return list(params)
