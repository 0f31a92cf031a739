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
    names = ["q", "k", "v", *["sinks"] * bool(row.sinks), *["mask"] * row.dmask]
    a |= {name: more.pop(name) for name in names[3:]}
    keywords = problem.keywords | more

    def call(*inputs):
        x = dict(zip(names, inputs, strict=True))
        q, k, v, beside = x["q"], x["k"], x["v"], {name: x[name] for name in names[3:]}
        if problem.cu:
            cu = map(jnp.asarray, problem.cu)
            packed = map(problem.packed, (q, k, v))
            o, lse = octet.attention_varlen(*packed, *cu, return_lse=True, **beside, **keywords)
            return o.swapaxes(0, 1)[None], lse[None]
        return octet.attention(q, k, v, return_lse=True, **beside, **keywords)

    inputs = [a[name] for name in names]
    (o, lse), pull = jax.vjp(call, *inputs)
    gradients = pull((a["do"], jnp.zeros_like(lse) if problem.dlse is None else jnp.asarray(problem.dlse)))
    got = {"o": o, "lse": lse} | {"d" + name: x for name, x in zip(names, gradients, strict=True)}
    if not problem.cu:
        tangents = [a["tq"], a["tk"], a["tv"], *([jnp.asarray(problem.tsinks)] if row.sinks else [])]
        mask = [a["mask"]] if row.dmask else []  # which has no tangent
        (_, _), (got["to"], got["tlse"]) = jax.jvp(lambda *x: call(*x, *mask), inputs[: len(tangents)], tangents)
    problem.expect(got)
