"""Every case of tests/cases.json through jax.vjp and jax.jvp against the definition in float64."""

import case_list
import octet
import pytest
from on_jax import jax, jnp, on_the_cpu_in_64_bits  # noqa: F401


@pytest.mark.parametrize("row", case_list.ROWS, ids=lambda row: row.name)
def test_every_pass_in_jax(row):
    problem = case_list.draw(row)
    a = {name: jnp.asarray(x) for name, x in problem.arrays.items()}
    more = {name: jnp.asarray(x) for name, x in problem.more.items()}
    names = ["q", "k", "v", *(["sinks"] if row.sinks else [])]
    a |= {name: more.pop(name) for name in names[3:]}
    keywords = problem.keywords | more

    def call(*inputs):
        x = dict(zip(names, inputs, strict=True))
        q, k, v, sinks = x["q"], x["k"], x["v"], x.get("sinks")
        if problem.cu:
            cu = map(jnp.asarray, problem.cu)
            packed = map(problem.packed, (q, k, v))
            o, lse = octet.attention_varlen(*packed, *cu, sinks=sinks, return_lse=True, **keywords)
            return o.swapaxes(0, 1)[None], lse[None]
        return octet.attention(q, k, v, sinks=sinks, return_lse=True, **keywords)

    inputs = [a[name] for name in names]
    (o, lse), pull = jax.vjp(call, *inputs)
    gradients = pull((a["do"], jnp.zeros_like(lse) if problem.dlse is None else jnp.asarray(problem.dlse)))
    got = {"o": o, "lse": lse} | {"d" + name: x for name, x in zip(names, gradients, strict=True)}
    if not problem.cu:
        tangents = [a["tq"], a["tk"], a["tv"], *([jnp.asarray(problem.tsinks)] if row.sinks else [])]
        (_, _), (got["to"], got["tlse"]) = jax.jvp(call, inputs, tangents)
    problem.expect(got)
