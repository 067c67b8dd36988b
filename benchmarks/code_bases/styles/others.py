"""Attention for series, tables, graphs, proteins, sets and translation, as research code writes it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.code_bases.case import Run, case
from benchmarks.code_bases.styles.vision import DIM, HEADS, Layers, style, tokens


@style("Informer", "FullAttention")
class Informer(nn.Module):
    """Time before heads: ``einsum("blhe,bshe->bhls")``, a triangular mask object, scale inside of dropout's call."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        B, L, _ = x.shape
        queries, keys, values = (p(x).view(B, L, HEADS, -1) for p in (self.query, self.key, self.value))
        scale = 1.0 / math.sqrt(queries.shape[-1])
        scores = torch.einsum("blhe,bshe->bhls", queries, keys)
        with torch.no_grad():
            mask = torch.triu(torch.ones([B, 1, L, L], dtype=torch.bool), diagonal=1)
        scores.masked_fill_(mask, -math.inf)
        A = self.dropout(torch.softmax(scale * scores, dim=-1))
        V = torch.einsum("bhls,bshd->blhd", A, values)
        return self.out(V.contiguous().view(B, L, -1))


@style("Transformer-XL", "relative shift", order=(1, 2, 0))
class TransformerXL(nn.Module):
    """Length first, two biases, scores of positions shifted by padding and a view, einsum in ``ibnd``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_net, self.o_net = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.r_net = nn.Linear(DIM, DIM, bias=False)
        self.r_w_bias, self.r_r_bias = (nn.Parameter(torch.randn(HEADS, DIM // HEADS) * 0.1) for _ in range(2))

    @staticmethod
    def shifted(x: Tensor) -> Tensor:
        padded = torch.cat([torch.zeros((x.size(0), 1, *x.size()[2:])), x], dim=1)
        return padded.view(x.size(1) + 1, x.size(0), *x.size()[2:])[1:].view_as(x)

    def forward(self, w: Tensor) -> Tensor:
        w = w.transpose(0, 1)
        qlen, bsz, _ = w.shape
        q, k, v = (y.view(qlen, bsz, HEADS, -1) for y in torch.chunk(self.qkv_net(w), 3, dim=-1))
        places = torch.arange(qlen - 1, -1, -1.0)[:, None] / 10000 ** torch.linspace(0, 1, DIM // 2)
        r = self.r_net(torch.cat([places.sin(), places.cos()], -1)).view(qlen, HEADS, -1)
        AC = torch.einsum("ibnd,jbnd->ijbn", (q + self.r_w_bias, k))
        BD = self.shifted(torch.einsum("ibnd,jnd->ijbn", (q + self.r_r_bias, r)))
        attn_score = AC + BD
        attn_score.mul_(1 / (DIM // HEADS) ** 0.5)
        mask = torch.triu(torch.ones(qlen, qlen), diagonal=1).bool()[:, :, None, None]
        attn_score = attn_score.float().masked_fill(mask, -float("inf")).type_as(attn_score)
        attn_prob = F.softmax(attn_score, dim=1)
        attn_vec = torch.einsum("ijbn,jbnd->ibnd", (attn_prob, v))
        return self.o_net(attn_vec.contiguous().view(qlen, bsz, -1)).transpose(0, 1)


@style("Set Transformer", "MAB")
class SetTransformer(nn.Module):
    """Heads split into chunks that are joined with the batch, ``baddbmm`` with the queries as residual."""

    def __init__(self) -> None:
        super().__init__()
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, X: Tensor) -> Tensor:
        Q, K, V = self.fc_q(X), self.fc_k(X), self.fc_v(X)
        Q_, K_, V_ = (torch.cat(y.split(DIM // HEADS, 2), 0) for y in (Q, K, V))
        A = torch.softmax(Q_.bmm(K_.transpose(1, 2)) / math.sqrt(DIM), 2)
        out = torch.cat((Q_ + A.bmm(V_)).split(Q.size(0), 0), 2)
        return out + F.relu(self.fc_o(out))


@style("AlphaFold 2 of DeepMind", "gated attention with a pair bias")
class Evoformer(nn.Module):
    """Five axes: rows of an alignment in the batch, a bias of pairs, a mask bias, gates."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.gating, self.out, self.pair = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(1, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        msa = x.view(x.shape[0], 4, 4, DIM)
        q, k, v = (p(msa).view(*msa.shape[:-1], HEADS, -1).transpose(-2, -3) for p in (self.q, self.k, self.v))
        q = q / math.sqrt(DIM // HEADS)
        distance = (torch.arange(4.0)[:, None] - torch.arange(4.0)[None]).abs()[None, ..., None]
        a = torch.matmul(q, k.permute(0, 1, 2, 4, 3))
        biases = [torch.zeros(x.shape[0], 4, 1, 1, 4), self.pair(distance).permute(0, 3, 1, 2).unsqueeze(1)]
        for b in biases:
            a = a + b
        a = torch.matmul(F.softmax(a, dim=-1), v).transpose(-2, -3)
        g = torch.sigmoid(self.gating(msa)).view(*msa.shape[:-1], HEADS, -1)
        return self.out((a * g).flatten(-2)).view_as(x)


@style("ESM of Facebook", "MSA row attention tied over rows")
class TiedRows(nn.Module):
    """Scores summed over the rows of an alignment: ``einsum("rinhd,rjnhd->hnij")``."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(x.shape[0], 4, 4, DIM).permute(1, 2, 0, 3)
        num_rows, num_cols, batch, _ = rows.shape
        q, k, v = (p(rows).view(num_rows, num_cols, batch, HEADS, -1) for p in (self.q_proj, self.k_proj, self.v_proj))
        q *= (DIM // HEADS) ** -0.5 / math.sqrt(num_rows)
        attn_weights = torch.einsum("rinhd,rjnhd->hnij", q, k)
        attn_probs = attn_weights.softmax(-1)
        context = torch.einsum("hnij,rjnhd->rinhd", attn_probs, v)
        context = context.contiguous().view(num_rows, num_cols, batch, DIM)
        return self.out_proj(context).permute(2, 0, 1, 3).reshape(x.shape)


@style("Luong attention", "general")
class Luong(nn.Module):
    """A recurrent decoder's attention in one head: ``bmm`` of states, softmax, ``bmm``, a joined output."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(DIM, DIM, batch_first=True)
        self.linear_in, self.linear_out = nn.Linear(DIM, DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        memory, _ = self.encoder(x)
        align = torch.bmm(self.linear_in(x), memory.transpose(1, 2))
        align_vectors = F.softmax(align.view(-1, x.shape[1]), -1).view(x.shape[0], x.shape[1], x.shape[1])
        c = torch.bmm(align_vectors, memory)
        return torch.tanh(self.linear_out(torch.cat([c, x], 2)))


@style("Bahdanau attention", "additive")
class Bahdanau(nn.Module):
    """A perceptron of each pair of states gives the scores: no product of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.W_q, self.W_k, self.w_v = nn.Linear(DIM, 8), nn.Linear(DIM, 8), nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.W_q(x).unsqueeze(2) + self.W_k(x).unsqueeze(1))
        scores = self.w_v(features).squeeze(-1)
        return torch.bmm(F.softmax(scores, dim=-1), x)


@style("graph attention networks", "dense GAT")
class DenseGAT(nn.Module):
    """Scores as sums of two numbers of nodes, a leaky ReLU, ``where`` on the adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.a = nn.Parameter(torch.randn(DIM, DIM) * 0.1), nn.Parameter(torch.randn(2 * DIM, 1) * 0.1)

    def forward(self, h: Tensor) -> Tensor:
        adj = ((torch.arange(16)[:, None] * 3 + torch.arange(16)[None]) % 4 == 0) | torch.eye(16, dtype=torch.bool)
        Wh = h @ self.W
        e = F.leaky_relu(Wh @ self.a[:DIM] + (Wh @ self.a[DIM:]).mT, 0.2)
        attention = torch.where(adj > 0, e, -9e15 * torch.ones_like(e))
        attention = F.softmax(attention, dim=-1)
        return F.elu(torch.matmul(F.dropout(attention, 0.1, training=self.training), Wh))


@style("Temporal Fusion Transformer", "InterpretableMultiHeadAttention")
class TFT(nn.Module):
    """A module for each head, one value for all heads, the mean of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qs, self.ks = (nn.ModuleList(nn.Linear(DIM, DIM // HEADS) for _ in range(1)) for _ in range(2))
        self.vs, self.w_h = nn.Linear(DIM, DIM // HEADS), nn.Linear(DIM // HEADS, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads, vs = [], self.vs(x)
        for qs, ks in zip(self.qs, self.ks, strict=True):
            attn = torch.bmm(qs(x), ks(x).permute(0, 2, 1)) / torch.as_tensor(DIM // HEADS, dtype=x.dtype).sqrt()
            attn = attn.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -1e9)
            heads.append(torch.bmm(nn.Softmax(dim=2)(attn), vs))
        return self.w_h(torch.stack(heads, dim=2).mean(dim=2))


@style("SASRec", "SelfAttention of recommenders")
class SASRec(nn.Module):
    """An additive mask of -10000, heads by view and permute, the layer norm after the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(DIM, DIM) for _ in range(4))
        self.LayerNorm, self.attn_dropout = nn.LayerNorm(DIM), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(*x.shape[:-1], HEADS, -1) for p in (self.query, self.key, self.value))
        scores = torch.matmul(q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1)) / math.sqrt(DIM // HEADS)
        mask = torch.tril(torch.ones(x.shape[1], x.shape[1])).expand(x.shape[0], 1, -1, -1)
        scores = scores + torch.where(mask.bool(), 0.0, -10000.0)
        context = torch.matmul(self.attn_dropout(nn.Softmax(dim=-1)(scores)), v.permute(0, 2, 1, 3))
        return self.LayerNorm(self.dense(context.permute(0, 2, 1, 3).flatten(2)) + x)


@style("Graphormer of Microsoft", "attention bias of a graph")
class Graphormer(nn.Module):
    """A bias by edge and distance, batch second, padding by ``masked_fill`` after the bias; dtype changes."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(DIM, DIM) for _ in range(4))
        self.spatial_pos_encoder = nn.Embedding(20, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        T, B, _ = x.shape
        q = self.q_proj(x) * (DIM // HEADS) ** -0.5
        q, k, v = (y.contiguous().view(T, B * HEADS, -1).transpose(0, 1) for y in (q, self.k_proj(x), self.v_proj(x)))
        weights = torch.bmm(q, k.transpose(1, 2))
        distance = (torch.arange(T)[:, None] - torch.arange(T)[None]).abs()
        bias = self.spatial_pos_encoder(distance).permute(2, 0, 1)[None].repeat(B, 1, 1, 1)
        weights += bias.view(B * HEADS, T, T)
        weights_float = F.softmax(weights, dim=-1, dtype=torch.float32)
        probs = F.dropout(weights_float.type_as(weights), 0.1, self.training)
        return self.out_proj(torch.bmm(probs, v).transpose(0, 1).contiguous().view(T, B, DIM)).transpose(0, 1)


def _slot_weights(model: nn.Module, run: Run) -> list[Tensor]:
    with torch.no_grad():
        run(model)
    return [layer.normalised for layer in model.get_submodule("layers").children()]


class Slots(nn.Module):
    """Softmax over the slots, then weights of each slot normalised over the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.slots = nn.Parameter(torch.randn(1, 3, DIM))
        self.normalised = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_q(self.slots.expand(x.shape[0], -1, -1)), self.to_k(x), self.to_v(x)
        dots = torch.einsum("bid,bjd->bij", q, k) * DIM**-0.5
        attn = dots.softmax(dim=1) + 1e-8
        attn = attn / attn.sum(dim=-1, keepdim=True)
        self.normalised = attn.detach()
        updates = torch.einsum("bjd,bij->bid", v, attn)
        return updates.mean(1, keepdim=True)


@case("slot attention of Locatello", "SlotAttention", 2, is_rewritten=True, truth=_slot_weights)
def slots() -> tuple[nn.Module, Run]:
    return Layers(Slots), lambda model: model(tokens())
