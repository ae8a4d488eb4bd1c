"""Chat templates that call tools in the ways models do: wrapped one by one, listed, or bare."""

_TURNS = """\
{%- if tools %}<|system|>You may call: {% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>
{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls %}<|assistant|>CALLS<|end|>
{%- else %}<|{{ m.role }}|>{{ m.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

_CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
_EACH = "{% for c in m.tool_calls %}{% if not loop.first %}BETWEEN{% endif %}CALL{% endfor %}"

_WRAPPED = _EACH.replace("BETWEEN", '{{ "\\n" }}').replace("CALL", f"<tool_call>\n{_CALL}\n</tool_call>")
_LISTED = f"[CALLS] [{_EACH.replace('BETWEEN', ', ').replace('CALL', _CALL)}]"
_BARE = (
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    "{% set c = m.tool_calls[0] %}" + _CALL.replace("arguments", "parameters", 1)
)
_PYTHONIC = (
    "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments }}){% endfor %}"
)

WRAPPED, LISTED, BARE, PYTHONIC = (
    _TURNS.replace("CALLS", calls, 1) for calls in (_WRAPPED, _LISTED, _BARE, _PYTHONIC)
)
WITHOUT_TOOLS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
WITHOUT_RESULTS = WRAPPED.replace("{%- else %}", "{%- elif m.role != 'tool' %}", 1)
