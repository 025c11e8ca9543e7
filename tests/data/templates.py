"""Chat templates and conversations of the tests of data."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3: the last answer is preceded by an empty thought, earlier ones are not.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '(think)' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen2.5: tools in front, and each call as JSON.
TOOLS = (
    "{% if tools %}{{ 'tools ' + (tools | tojson) + '\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As DeepSeek-V3: the arguments of a call are concatenated as text.
TEXT_CALLS = TOOLS.replace("(call.function | tojson)", "call.function.name + call.function.arguments")
TWO_ANSWERS = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat"},
    {"role": "user", "content": "the dog"},
    {"role": "assistant", "content": "on the mat"},
]


def trained_texts(tokenizer, sample):
    """Return the texts of the tokens of a sample, those outside the loss as None."""
    pairs = zip(sample["input_ids"], sample["labels"])
    return [None if label == -100 else tokenizer.decode([token]) for token, label in pairs]


def learned(tokenizer, sample):
    """Return the text that is learned of a sample."""
    return "".join(text for text in trained_texts(tokenizer, sample) if text is not None)


def texts(tokenizer, sample):
    """Return the texts of the tokens of a sample."""
    return [tokenizer.decode([token]) for token in sample["input_ids"]]
