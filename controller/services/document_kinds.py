"""Kinds of office documents: which fields they have, what values look like, and how a person would ask for one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Field:
    """One "key: value" line and the question whose answer is the value."""

    key: str
    question: str
    value: Callable[[random.Random], str]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of document; at least six fields."""

    title: str
    fields: tuple[Field, ...]


def _date(rng: random.Random) -> str:
    return f"{rng.randint(2023, 2026)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _time(rng: random.Random) -> str:
    return f"{rng.randint(6, 21):02d}:{rng.choice((0, 15, 30, 45)):02d}"


def _amount(rng: random.Random) -> str:
    return f"{rng.randint(20, 9800)}.{rng.randint(0, 99):02d} {rng.choice(('EUR', 'USD', 'CHF'))}"


def _name(rng: random.Random) -> str:
    first = rng.choice(("Anna", "Peter", "Maria", "David", "Julia", "Thomas", "Sara", "Martin", "Laura", "Victor"))
    return f"{first} {rng.choice(('Keller', 'Moreau', 'Novak', 'Hansen', 'Rossi', 'Meyer', 'Duarte', 'Larsen'))}"


def _company(rng: random.Random) -> str:
    first = rng.choice(("Northwind", "Alpine", "Harbour", "Meridian", "Bluefield", "Granite", "Cobalt", "Linden"))
    return f"{first} {rng.choice(('Ltd', 'GmbH', 'Trading', 'Supplies', 'Works', 'Group'))}"


def _city(rng: random.Random) -> str:
    return rng.choice(("Hamburg", "Lyon", "Porto", "Vienna", "Gdansk", "Utrecht", "Bergen", "Turin", "Zurich", "Cork"))


def _number(prefix: str, low: int, high: int) -> Callable[[random.Random], str]:
    return lambda rng: f"{prefix}{rng.randint(low, high)}"


def _measure(low: float, high: float, unit: str, digits: int = 1) -> Callable[[random.Random], str]:
    return lambda rng: f"{rng.uniform(low, high):.{digits}f} {unit}"


def _one_of(*values: str) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(values)


KINDS: tuple[Kind, ...] = (
    Kind(
        "INVOICE",
        (
            Field("Invoice number", "What is the invoice number?", _number("INV-", 10000, 99999)),
            Field("Invoice date", "On which date was the invoice issued?", _date),
            Field("Supplier", "Who is the supplier?", _company),
            Field("Payment terms", "What are the payment terms?", _one_of("14 days", "30 days", "60 days net")),
            Field("Total amount", "What is the total amount?", _amount),
            Field("VAT rate", "Which VAT rate applies?", _one_of("7 %", "19 %", "20 %", "21 %")),
            Field("Bank account", "To which bank account should I pay?", _number("DE", 10000000, 99999999)),
            Field("Contact", "Who is the contact person?", _name),
        ),
    ),
    Kind(
        "DELIVERY NOTE",
        (
            Field("Order number", "What is the order number?", _number("ORD-", 1000, 9999)),
            Field("Delivery date", "When is the delivery date?", _date),
            Field("Destination", "What is the destination of the delivery?", _city),
            Field("Carrier", "Which carrier brings it?", _company),
            Field("Packages", "How many packages are there?", _number("", 2, 48)),
            Field("Weight", "What is the weight?", _measure(3, 480, "kg")),
            Field("Received by", "Who received the goods?", _name),
        ),
    ),
    Kind(
        "LAB REPORT",
        (
            Field("Patient", "What is the name of the patient?", _name),
            Field("Sample ID", "What is the sample ID?", _number("S", 100000, 999999)),
            Field("Glucose", "What is the glucose value?", _measure(70, 180, "mg/dL", 0)),
            Field("Hemoglobin", "How high is the hemoglobin?", _measure(9, 18, "g/dL")),
            Field("Cholesterol", "How much cholesterol was found?", _measure(120, 280, "mg/dL", 0)),
            Field("Physician", "Which physician ordered the test?", lambda rng: f"Dr. {_name(rng).split()[1]}"),
            Field("Collected", "When was the sample collected?", _date),
        ),
    ),
    Kind(
        "PURCHASE ORDER",
        (
            Field("Buyer", "Who is the buyer?", _company),
            Field("PO number", "What is the PO number?", _number("PO-", 20000, 89999)),
            Field("Item", "Which item is ordered?", _one_of("Steel bolts", "Copper wire", "Oak panels", "LED lamps")),
            Field("Quantity", "What quantity is ordered?", _number("", 10, 990)),
            Field("Unit price", "What is the unit price?", _amount),
            Field("Ship to", "Where should it be shipped to?", _city),
            Field("Approved by", "Who approved the order?", _name),
        ),
    ),
    Kind(
        "SERVICE REPORT",
        (
            Field("Technician", "What is the name of the technician?", _name),
            Field("Machine", "Which machine was serviced?", _one_of("Pump P-12", "Mill M-07", "Lathe L-03", "Fan F-21")),
            Field("Operating hours", "How many operating hours has it?", _measure(100, 9000, "h", 0)),
            Field("Oil pressure", "What is the oil pressure?", _measure(2, 6, "bar")),
            Field("Temperature", "Which temperature was measured?", _measure(35, 95, "C", 0)),
            Field("Fault code", "What is the fault code?", _number("E-", 100, 999)),
            Field("Next service", "When is the next service due?", _date),
        ),
    ),
    Kind(
        "BOARDING PASS",
        (
            Field("Passenger", "Who is the passenger?", _name),
            Field("Flight", "What is the flight number?", _number("TG ", 100, 999)),
            Field("Departure", "From which city does it depart?", _city),
            Field("Boarding time", "What is the boarding time?", _time),
            Field("Gate", "Which gate do I go to?", lambda rng: f"{rng.choice('ABCD')}{rng.randint(1, 40)}"),
            Field("Seat", "Which seat do I have?", lambda rng: f"{rng.randint(1, 32)}{rng.choice('ACDF')}"),
            Field("Baggage", "How much baggage is allowed?", _one_of("8 kg", "12 kg", "23 kg", "32 kg")),
        ),
    ),
    Kind(
        "RENTAL AGREEMENT",
        (
            Field("Tenant", "Who is the tenant?", _name),
            Field("Landlord", "Who is the landlord?", _company),
            Field("Monthly rent", "How much is the monthly rent?", _amount),
            Field("Deposit", "How large is the deposit?", _amount),
            Field("Start date", "What is the start date?", _date),
            Field("Floor area", "How large is the floor area?", _measure(24, 140, "m2", 0)),
            Field("City", "In which city is it?", _city),
        ),
    ),
    Kind(
        "PAYSLIP",
        (
            Field("Employee", "What is the name of the employee?", _name),
            Field("Department", "In which department?", _one_of("Logistics", "Finance", "Research", "Support")),
            Field("Gross salary", "How much is the gross salary?", _amount),
            Field("Income tax", "How much income tax was deducted?", _amount),
            Field("Hours worked", "How many hours were worked?", _number("", 60, 184)),
            Field("Personnel no", "What is the personnel number?", _number("", 10000, 99999)),
            Field("Vacation left", "How much vacation is left?", _measure(1, 28, "days", 0)),
        ),
    ),
)  # fmt: skip
