"""A text for checks of models with a tokenizer but without documents: plain English of several kinds."""

TEXT = """\
A bakery on the corner opens at six in the morning. The first customers are nurses who come from the night shift, and
drivers who start before the traffic does. They buy bread that is still warm, two rolls with cheese, a small coffee.
At eight the children come past on their way to school, and by ten only the raisin buns are left.

Question: A train leaves at 14:05 and travels 180 kilometres at 90 kilometres per hour. When does it arrive?
Answer: 180 divided by 90 is 2, so the journey takes two hours. The train arrives at 16:05.

Water boils at a lower temperature in the mountains, because the air presses less on its surface. At three thousand
metres that is about ninety degrees, so potatoes need longer there. A pot with a tight lid helps: steam that cannot
leave raises the pressure again.

def mean(values):
    if not values:
        raise ValueError("mean of no values")
    return sum(values) / len(values)

user: Can you give me three ideas for a rainy Sunday with two small children?
assistant: Of course. Build a tent of blankets and read in it with a torch. Bake pancakes and let the children choose
what goes on top. Draw a map of the flat, hide something small, and mark the place with a cross.

The committee met on the second of March. It heard a report on the bridge, which needs new bearings before the winter,
and approved the budget with seven votes against two. The next meeting will be held in April, at the usual place.

Dear Ms Hansen, thank you for your letter. We have received the parcel, but one of the four chairs has a broken leg.
Could you please send us another one, or tell us where we may have it repaired? With kind regards, Paul Weber.

Foxes live in cities because cities feed them. They eat what people leave behind, mice, and fallen fruit in autumn.
Most of them sleep through the day under sheds and railway banks, and cross the streets only after midnight.

To plant a tree, dig a hole twice as wide as its roots, but no deeper. Set the tree straight, fill the hole with the
same earth, and press it down with your foot. Water it well in the first summer, then let it look after itself.
"""
